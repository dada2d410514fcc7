"""Names of the control plane's sockets, in a folder that only its user can enter."""

CHANNEL = "channel"
HTTP = "http"
