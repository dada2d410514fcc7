"""Identifiers. Distinct types, so that a node is never passed for a job."""

from typing import NewType

JobId = NewType("JobId", str)
NodeId = NewType("NodeId", str)
DeviceId = NewType("DeviceId", str)
DeploymentId = NewType("DeploymentId", str)
GroupId = NewType("GroupId", str)
InstanceId = NewType("InstanceId", str)
TurnId = NewType("TurnId", str)
TrajectoryId = NewType("TrajectoryId", str)
TenantId = NewType("TenantId", str)
SessionId = NewType("SessionId", str)
ModelId = NewType("ModelId", str)
RequestId = NewType("RequestId", str)
SamplingSessionId = NewType("SamplingSessionId", str)
WorkerId = NewType("WorkerId", str)
ActionId = NewType("ActionId", str)
EnvironmentId = NewType("EnvironmentId", str)
ResourceName = NewType("ResourceName", str)
ServiceName = NewType("ServiceName", str)

NOBODY = TenantId("")  # the owner where there are no tenants
