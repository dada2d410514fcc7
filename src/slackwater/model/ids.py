"""Identifiers. Distinct types, so that a node is never passed for a job."""

from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
GroupId = NewType("GroupId", str)
InstanceId = NewType("InstanceId", str)
TurnId = NewType("TurnId", str)
TrajectoryId = NewType("TrajectoryId", str)
