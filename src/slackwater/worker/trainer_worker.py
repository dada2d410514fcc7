"""The trainer process: runs one operation at a time for any of its models.

Where the node has a state manager, it decides which models are resident; the least recently used
make room.
"""

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from slackwater.model.device import CUDA
from slackwater.model.errors import NotFoundError, SlackwaterError, UnavailableError
from slackwater.model.residency import DISK_MB
from slackwater.model.uri import part_of
from slackwater.nets.lora import LoraSpec
from slackwater.nets.ranks import RankPlan, Ranks, leave_at_once
from slackwater.state.client import SOCKET_VARIABLE, StateClient
from slackwater.state.device import DeviceTier
from slackwater.training.datum import Datum
from slackwater.training.managed_state import ManagedState
from slackwater.training.trainer import Trainer
from slackwater.weights.relay.publisher import RelayStocker
from slackwater.wire import messages
from slackwater.wire.batches import Array, PassResult, decode_batch, encode_metrics, encode_result
from slackwater.worker.connection import Connection, DisconnectedError
from slackwater.worker.files import NodeFiles, node_files
from slackwater.worker.node_devices import VISIBLE_VARIABLE
from slackwater.worker.process import (
    address_of,
    base_parser,
    dial,
    node_secret,
    pin,
    run_worker,
    secret,
)
from slackwater.worker.publishing import VersionPublisher
from slackwater.worker.rank_link import RankLink
from slackwater.worker.state_service import MOVED
from slackwater.worker.weight_lane import lora_meta

logger = logging.getLogger(__name__)
_NUMBERED = (
    messages.RunPass,
    messages.StepOptimizer,
    messages.DiscardGradients,
    messages.LoadState,
)

_NO_LIMIT = 1 << 62  # the budget is the manager's


class ResidentModels:
    """Deployments by model; creating a model again replaces its deployment."""

    def __init__(self, client: StateClient, device: str) -> None:
        self._client = client
        self._tier = DeviceTier(client, client.name, _NO_LIMIT, device)
        client.attach(self._tier)
        self._deployments: dict[str, str] = {}
        self._states: dict[str, ManagedState] = {}
        self._numbers = itertools.count(1)

    def add(self, model: str, trainer: Trainer, seq: int = -1, at_most: int = -1) -> int | None:
        """Manage a model's state as of operation `seq`; RefusedError if it does not fit.

        If a dead worker left a later state, up to `at_most`, in the node's memory, that state is
        used and its number returned.
        """
        mine = f"{model}@{self._client.name}-{os.getpid()}.{next(self._numbers)}"
        left = self._client.survivor(f"{model}@", seq, at_most)
        if left is None:  # what is of no use must not stand in the way
            self._client.forget_abandoned(f"{model}@")
        deployment = left or mine
        state = ManagedState(trainer, model, deployment, seq)
        self._tier.add(deployment, state.parts(), state, warm=not _spills())
        self._client.forget_abandoned(f"{model}@")
        self._deployments[model], self._states[model] = deployment, state
        with self._tier.use(deployment):
            pass  # its memory is the managed one from here on
        if left is None:
            return None
        how = "came from another node" if f"@{MOVED}" in left else "outlived its trainer"
        logger.info("model %s: its state after operation %d %s", model, state.seq, how)
        return state.seq

    @contextlib.contextmanager
    def use(self, model: str, seq: int | None = None) -> Iterator[None]:
        """Keep the model's state on the device inside; operation `seq` changes it."""
        with self._tier.use(self._deployments[model]):
            yield
            if seq is not None:
                self._states[model].seq = seq

    def drop(self, model: str) -> None:
        self._states.pop(model, None)
        deployment = self._deployments.pop(model, None)
        if deployment is not None:
            self._client.forget_when_unused(deployment)

    def close(self) -> None:
        self._client.close()
        self._tier.close()


def _spills() -> bool:
    return float(os.environ.get(DISK_MB) or 0) > 0


def resident_models(worker: str, device: str) -> ResidentModels | None:
    """None where the node has no state manager."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        return None
    own = os.environ.get(VISIBLE_VARIABLE, "") if device.startswith(CUDA) else ""
    return ResidentModels(StateClient(path, worker, node_secret(), own), device)


class TrainerWorker:
    """Models by id, each a `Trainer` on one device, computing in one dtype; with `ranks` it is one
    of several that share each trainer.
    """

    def __init__(
        self,
        connection: Connection | None,
        files: NodeFiles,
        device: str,
        dtype: str = "float32",
        stocker: RelayStocker | None = None,
        node: str = "",
        resident: ResidentModels | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._link: RankLink | None = None
        if ranks is not None:
            self._link = RankLink(ranks, connection)
        source = self._link or connection
        assert source is not None, "the only rank, and rank 0 of several, has a connection"
        self._connection: Connection | RankLink = source
        self._files = files
        self._publishing = VersionPublisher(
            files.weights(),
            self._tell if self._link is None else self._link.report,
            _unwritten,
            stocker=stocker,
            node=node,
        )
        self._device, self._dtype = device, dtype
        self._trainers: dict[str, Trainer] = {}
        self._resident = resident
        self._reached: int | None = None  # of a state that was found by the running operation
        self._applied: dict[str, int] = {}  # a model's last operation
        self._inherited: set[str] = set()  # models that no control plane knows to be here
        self._writing = False
        self._link_lost: Callable[[], bool] = lambda: connection is not None and connection.lost
        if connection is not None and ranks is None:
            connection.may_outlive = lambda: not self._writing and not self._publishing.busy
            connection.returned = self._returned

    def _returned(self) -> None:
        """A control plane has adopted this trainer. A state under the node's state manager could
        stand in the way of another trainer's.
        """
        self._inherited = set(self._trainers)
        if self._resident is not None:
            self._drop_inherited()

    def _drop_inherited(self) -> None:
        while self._inherited:
            self._drop(self._inherited.pop())

    def _find(self, message: messages.CreateModel | messages.RestoreModel) -> bool:
        """Whether the model's state is here, as of an operation that it may have."""
        applied = self._applied.get(message.model, -1)
        if message.model not in self._inherited:
            self._drop_inherited()
            return False
        self._inherited.discard(message.model)
        here = message.model in self._trainers
        if not here or not max(message.seq, 0) <= applied <= message.at_most:
            return False
        logger.info("model %s: its state after operation %d is here", message.model, applied)
        self._reached = applied
        return True

    def _tell(self, message: messages.Message) -> None:
        self._connection.send(messages.encode(message))

    def run(self) -> None:
        """Run until stopped."""
        while True:
            for message in self._connection.receive(None):
                if isinstance(message, messages.Stop):
                    return
                self._do(message)

    def _do(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.DropModel):
            self._drop(message.model)
            return
        if not isinstance(message, messages.TrainerOp):
            logger.warning("not for a trainer: %s", type(message).__name__)
            return
        started_s = time.perf_counter()
        self._reached = None
        self._writing = isinstance(message, messages.SaveState | messages.PublishWeights)
        if self._writing and self._link_lost():
            raise DisconnectedError("another trainer may write the same by now")
        try:
            result = self._result(message)
            if isinstance(message, _NUMBERED):
                self._applied[message.model] = message.seq
        except Exception as error:  # noqa: BLE001  (the process edge: one operation fails, not all)
            failure = self._failure(message, error)
            if self._link is not None:
                if failure.state_lost:  # a collective may be half done: nobody can go on from there
                    leave_at_once()
                self._link.agree(1)
            self._connection.send(messages.encode(failure))
            return
        finally:
            self._writing = False
        if self._link is not None:
            self._link.agree(0)
        elapsed_s = time.perf_counter() - started_s
        if isinstance(message, messages.PublishWeights):
            return  # it says itself when it is written
        done = messages.OpDone(message.op, elapsed_s, result, self._reached)
        self._connection.send(messages.encode(done))

    def _failure(self, message: messages.TrainerOp, error: Exception) -> messages.OpFailed:
        """Refusals and full disks leave the state intact; after anything else it is dropped."""
        if isinstance(error, SlackwaterError) and not isinstance(error, UnavailableError):
            return messages.OpFailed(message.op, str(error), "user", state_lost=False)
        logger.exception("operation failed kind=%s model=%s", type(message).__name__, message.model)
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):
            return messages.OpFailed(message.op, said, "server", state_lost=False)
        self._drop(message.model)
        return messages.OpFailed(message.op, said, "server", state_lost=True)

    def _drop(self, model: str) -> None:
        self._trainers.pop(model, None)
        if self._resident is not None:
            self._resident.drop(model)

    def _take(
        self, message: messages.CreateModel | messages.RestoreModel, trainer: Trainer
    ) -> None:
        """A refusal, for want of host memory, leaves the model uncreated."""
        model = message.model
        if self._resident is not None:
            self._resident.drop(model)
            self._reached = self._resident.add(model, trainer, message.seq, message.at_most)
        self._trainers[model] = trainer
        self._applied[model] = message.seq if self._reached is None else self._reached

    def _on_device(self, message: messages.TrainerOp) -> contextlib.AbstractContextManager[None]:
        """With a state manager: bring the model's state to the device, evicting others."""
        if self._resident is None:
            return contextlib.nullcontext()
        seq = message.seq if isinstance(message, _NUMBERED) else None
        return self._resident.use(message.model, seq)

    def _result(self, message: messages.TrainerOp) -> bytes:
        match message:
            case messages.CreateModel() | messages.RestoreModel() if self._find(message):
                return b""
            case messages.CreateModel():
                self._take(message, self._created(message))
                return b""
            case messages.RestoreModel(_, _, saved, source):
                self._take(message, self._restored(saved, source))
                return b""
        trainer = self._trainers.get(message.model)
        if trainer is None:
            raise NotFoundError(f"model {message.model}: has no state here; was it ever created?")
        with self._on_device(message):
            return self._operated(trainer, message)

    def _operated(self, trainer: Trainer, message: messages.TrainerOp) -> bytes:
        match message:
            case messages.RunPass(_, _, batch):
                return _run_pass(trainer, batch)
            case messages.StepOptimizer(_, _, adam):
                return encode_metrics(trainer.optim_step(adam))
            case messages.DiscardGradients():
                trainer.discard_gradient()
            case messages.SaveState(_, _, saved):
                with self._opened(lambda: self._files.new_state(saved)) as folder:
                    trainer.save(folder)
            case messages.LoadState(_, _, saved, optimizer):
                with self._opened(lambda: self._files.saved_state(saved)) as folder:
                    trainer.load_into(folder, optimizer)
            case messages.PublishWeights(op, model, version, durable, stock):
                if self._ranks is not None:
                    self._publish_part(trainer, message)
                    return b""
                what = (op, model, version, trainer.weights(), lora_meta(trainer.meta.lora))
                self._publishing.begin(*what, durable=durable, stock=stock)
        return b""

    def _publish_part(self, trainer: Trainer, message: messages.PublishWeights) -> None:
        """Write this rank's slices; the version's own file, without tensors, makes it visible."""
        assert self._ranks is not None and self._link is not None
        op, version, ranks = message.op, message.version, self._ranks.layout.ranks
        meta, durable = lora_meta(trainer.meta.lora), message.durable
        store = self._files.weights()
        self._link.begin_version(
            op, lambda: store.publish(version, {}, {**meta, "parts": ranks}, durable=durable)
        )
        part = part_of(version, self._ranks.rank, ranks)
        what = (op, message.model, part, trainer.weight_slices(), meta)
        self._publishing.begin(*what, durable=durable, stock=False)

    def _opened(
        self, opened: Callable[[], contextlib.AbstractContextManager[Path]]
    ) -> contextlib.AbstractContextManager[Path]:
        return opened() if self._link is None else self._link.share_folder(opened)

    def _restored(self, saved: str, source: str) -> Trainer:
        base = self._files.model(source) if source else None
        with self._opened(lambda: self._files.saved_state(saved)) as folder:
            return Trainer.load(
                folder, source=base, dtype=self._dtype, device=self._device, ranks=self._ranks
            )

    def _created(self, message: messages.CreateModel) -> Trainer:
        shape, lora = message.lora, None
        if shape.rank:
            lora = LoraSpec(
                shape.rank,
                seed=message.seed,
                attn=shape.train_attn,
                mlp=shape.train_mlp,
                unembed=shape.train_unembed,
            )
        return Trainer.create(
            self._files.model(message.source),
            lora,
            message.seed,
            dtype=self._dtype,
            device=self._device,
            ranks=self._ranks,
        )


def _unwritten(op: int, error: Exception) -> messages.OpFailed:
    """A version could not be written; the model's state is unchanged."""
    if isinstance(error, SlackwaterError) and not isinstance(error, UnavailableError):
        return messages.OpFailed(op, str(error), "user", state_lost=False)
    logger.error("version not written: %s", error, exc_info=error)
    return messages.OpFailed(op, f"{type(error).__name__}: {error}", "server", state_lost=False)


def _run_pass(trainer: Trainer, data: bytes) -> bytes:
    batch = decode_batch(data)
    examples = [
        Datum(
            example.tokens.numpy().astype(np.int64, copy=False),
            {name: array.numpy() for name, array in example.inputs.items()},
        )
        for example in batch.examples
    ]
    output = trainer.forward_backward(
        examples, batch.loss_fn, batch.loss_config, forward_only=batch.forward_only
    )
    logprobs = [Array.of(values) for values in output.logprobs]
    return encode_result(PassResult(logprobs, dict(output.metrics)))


def main() -> None:
    parser = base_parser("A trainer worker; `slackwater up` starts it.")
    parser.add_argument("--dtype", default="float32", help="what nets compute in; masters are fp32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plan = RankPlan.from_environment(os.environ)
    ranks = None if plan is None else Ranks.join(plan, options.device)
    files = node_files(options.files, secret(), pin())
    if ranks is not None and not ranks.leads:
        TrainerWorker(None, files, options.device, options.dtype, ranks=ranks).run()
        return
    hello = messages.Hello(options.worker, "trainer")
    with dial(options.connect, hello) as connection:
        if ranks is not None:
            TrainerWorker(connection, files, options.device, options.dtype, ranks=ranks).run()
            return
        stocker = None
        if options.relay:
            stocker = RelayStocker(address_of(options.relay), node_secret().encode())
        resident = resident_models(options.worker, options.device)
        how = (options.device, options.dtype, stocker, options.node, resident)
        TrainerWorker(connection, files, *how).run()


if __name__ == "__main__":
    run_worker(main)
