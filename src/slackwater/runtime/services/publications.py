"""Announces weight versions: those of finished publishes, and those known before this start."""

from dataclasses import dataclass

from slackwater.model.ids import SessionId
from slackwater.model.operation import Operation, OpKind
from slackwater.model.session import TrainedModel
from slackwater.runtime.executors.engines import EngineExecutor
from slackwater.runtime.net.background import Background
from slackwater.runtime.services.finishing import sampling_session_of
from slackwater.runtime.services.housekeeping import Housekeeping
from slackwater.runtime.services.sampling import SamplingService
from slackwater.runtime.services.sessions import Sessions
from slackwater.runtime.store.base_models import BaseModels
from slackwater.runtime.store.database import Store
from slackwater.runtime.store.op_payloads import decode_publish
from slackwater.runtime.store.versions import read_known_versions


@dataclass(frozen=True, slots=True)
class Publications:
    """Tells the weight director of versions; housekeeping removes those that are replaced."""

    rollout: EngineExecutor
    sampling: SamplingService
    sessions: Sessions
    background: Background
    housekeeping: Housekeeping

    def record_operation(self, model: TrainedModel, operation: Operation, payload: bytes) -> None:
        """Announce what a finished operation published, and clean up what it replaced."""
        if operation.kind is OpKind.SAVE:
            self.background.spawn(self.housekeeping.drop_unlisted_states(model))
        if operation.kind is not OpKind.PUBLISH:
            return
        publish = decode_publish(payload)
        if publish.sampling_session is not None:
            self.sampling.add_session(sampling_session_of(model, operation, publish))
            self.background.spawn(self.housekeeping.trim_versions(model))
        self.rollout.publish(
            publish.version,
            model.base_model,
            self.sessions.job_of(model.session),
            line=model.model,
            adapter=model.lora.rank > 0,
            sampled=publish.sampling_session is not None,
        )

    async def adopt(self, store: Store, bases: BaseModels) -> None:
        """Announce the base models' weights and the versions that the store names."""
        for base in bases:
            self.rollout.publish(base.version, base.name)
        for known in await store.call(read_known_versions):
            job = self.sessions.job_of(SessionId(known.session))
            self.rollout.publish(
                known.version,
                known.base_model,
                job,
                line=known.line,
                adapter=known.adapter,
                sampled=False,
            )
