"""The tables of version 0.1.0, whose databases carry no number: they are stamped with this one."""

revision = "0001"
down_revision = None
