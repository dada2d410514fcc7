"""The trainer process: runs one operation at a time for any of its models.

Where the node has a state manager, it decides which models are resident on the device and evicts
the least recently used ones.
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
from slackwater.nets.lora import LoraSpec, lora_meta
from slackwater.nets.ranks import RankPlan, Ranks, exit_at_once
from slackwater.state.client import SOCKET_VARIABLE, StateClient
from slackwater.state.device import DeviceTier
from slackwater.training.datum import Datum
from slackwater.training.managed_state import ManagedState
from slackwater.training.trainer import Trainer
from slackwater.weights.relay.publisher import RelayPublisher
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
from slackwater.worker.publishing import Publication, VersionPublisher
from slackwater.worker.rank_link import RankLink
from slackwater.worker.state_service import MOVED

logger = logging.getLogger(__name__)
_SEQUENCED_OPS = (
    messages.RunPass,
    messages.StepOptimizer,
    messages.DiscardGradients,
    messages.LoadState,
)

_NO_LIMIT = 1 << 62  # the state manager has the budget


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
        fresh = f"{model}@{self._client.name}-{os.getpid()}.{next(self._numbers)}"
        survivor = self._client.survivor(f"{model}@", seq, at_most)
        if survivor is None:  # an unusable state must not occupy memory
            self._client.forget_abandoned(f"{model}@")
        deployment = survivor or fresh
        state = ManagedState(trainer, model, deployment, seq)
        spills = float(os.environ.get(DISK_MB) or 0) > 0
        self._tier.add(deployment, state.parts(), state, warm=not spills)
        self._client.forget_abandoned(f"{model}@")
        self._deployments[model], self._states[model] = deployment, state
        with self._tier.use(deployment):
            pass  # from here on its memory is managed
        if survivor is None:
            return None
        origin = "came from another node" if f"@{MOVED}" in survivor else "outlived its trainer"
        logger.info("model %s: its state after operation %d %s", model, state.seq, origin)
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


def resident_models(worker: str, device: str) -> ResidentModels | None:
    """None where the node has no state manager."""
    path = os.environ.get(SOCKET_VARIABLE)
    if not path:
        return None
    visible_devices = os.environ.get(VISIBLE_VARIABLE, "") if device.startswith(CUDA) else ""
    return ResidentModels(StateClient(path, worker, node_secret(), visible_devices), device)


class TrainerWorker:
    """Models by id, each a `Trainer` on one device, computing in one dtype.

    With `ranks` this process is one of several that share each trainer.
    """

    def __init__(
        self,
        connection: Connection | None,
        files: NodeFiles,
        device: str,
        dtype: str = "float32",
        stocker: RelayPublisher | None = None,
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
            self._send if self._link is None else self._link.report,
            _publish_failure,
            stocker=stocker,
            node=node,
        )
        self._device, self._dtype = device, dtype
        self._trainers: dict[str, Trainer] = {}
        self._resident = resident
        self._reached_seq: int | None = None  # of a state that the running operation reuses
        self._applied: dict[str, int] = {}  # a model's last operation
        self._inherited: set[str] = set()  # models that the new control plane does not know of
        self._is_writing = False
        self._link_lost: Callable[[], bool] = lambda: connection is not None and connection.lost
        if connection is not None and ranks is None:
            connection.may_outlive = lambda: not self._is_writing and not self._publishing.busy
            connection.on_adopted = self._handle_adoption

    def _handle_adoption(self) -> None:
        """After adoption by a new control plane: keep the models for reuse.

        Models under the node's state manager are dropped: their states could block those of another
        trainer.
        """
        self._inherited = set(self._trainers)
        if self._resident is not None:
            self._drop_inherited()

    def _drop_inherited(self) -> None:
        while self._inherited:
            self._drop(self._inherited.pop())

    def _reuse_state(self, message: messages.CreateModel | messages.RestoreModel) -> bool:
        """Whether this process still has the model's state, as of an acceptable operation."""
        applied = self._applied.get(message.model, -1)
        if message.model not in self._inherited:
            self._drop_inherited()
            return False
        self._inherited.discard(message.model)
        is_here = message.model in self._trainers
        if not is_here or not max(message.seq, 0) <= applied <= message.at_most:
            return False
        logger.info("model %s: its state after operation %d is here", message.model, applied)
        self._reached_seq = applied
        return True

    def _send(self, message: messages.Message) -> None:
        self._connection.send(messages.encode(message))

    def run(self) -> None:
        while True:
            for message in self._connection.receive(None):
                if isinstance(message, messages.Stop):
                    return
                self._handle_message(message)

    def _handle_message(self, message: messages.ToWorker) -> None:
        if isinstance(message, messages.DropModel):
            self._drop(message.model)
            return
        if not isinstance(message, messages.TrainerOp):
            logger.warning("not for a trainer: %s", type(message).__name__)
            return
        started_s = time.perf_counter()
        self._reached_seq = None
        self._is_writing = isinstance(message, messages.SaveState | messages.PublishWeights)
        if self._is_writing and self._link_lost():
            raise DisconnectedError(
                "the control plane is lost; another trainer may write the same files now"
            )
        try:
            result = self._execute(message)
            if isinstance(message, _SEQUENCED_OPS):
                self._applied[message.model] = message.seq
        except Exception as error:  # noqa: BLE001  (the process edge: one operation fails, not all)
            failure = self._failure(message, error)
            if self._link is not None:
                if failure.state_lost:  # a collective may be half done, so no rank can continue
                    exit_at_once()
                self._link.agree(1)
            self._connection.send(messages.encode(failure))
            return
        finally:
            self._is_writing = False
        if self._link is not None:
            self._link.agree(0)
        elapsed_s = time.perf_counter() - started_s
        if isinstance(message, messages.PublishWeights):
            return  # `VersionPublisher` reports when it is written
        done = messages.OpDone(message.op, elapsed_s, result, self._reached_seq)
        self._connection.send(messages.encode(done))

    def _failure(self, message: messages.TrainerOp, error: Exception) -> messages.OpFailed:
        """Refusals and full disks leave the state intact; after anything else it is dropped."""
        failure = _op_failed(message.op, error, state_lost=not isinstance(error, OSError))
        if failure.owner == "server":
            kind = type(message).__name__
            logger.exception("operation failed kind=%s model=%s", kind, message.model)
        if failure.state_lost:
            self._drop(message.model)
        return failure

    def _drop(self, model: str) -> None:
        self._trainers.pop(model, None)
        if self._resident is not None:
            self._resident.drop(model)

    def _register(
        self, message: messages.CreateModel | messages.RestoreModel, trainer: Trainer
    ) -> None:
        """Register a model; if host memory is short, it is refused and not created."""
        model = message.model
        if self._resident is not None:
            self._resident.drop(model)
            self._reached_seq = self._resident.add(model, trainer, message.seq, message.at_most)
        self._trainers[model] = trainer
        self._applied[model] = message.seq if self._reached_seq is None else self._reached_seq

    def _on_device(self, message: messages.TrainerOp) -> contextlib.AbstractContextManager[None]:
        """With a state manager: load the model's state to the device, evicting others."""
        if self._resident is None:
            return contextlib.nullcontext()
        seq = message.seq if isinstance(message, _SEQUENCED_OPS) else None
        return self._resident.use(message.model, seq)

    def _execute(self, message: messages.TrainerOp) -> bytes:
        match message:
            case messages.CreateModel() | messages.RestoreModel() if self._reuse_state(message):
                return b""
            case messages.CreateModel():
                self._register(message, self._create_trainer(message))
                return b""
            case messages.RestoreModel(_, _, saved, source):
                self._register(message, self._restore_trainer(saved, source))
                return b""
        trainer = self._trainers.get(message.model)
        if trainer is None:
            raise NotFoundError(f"model {message.model}: has no state here; was it ever created?")
        with self._on_device(message):
            return self._run_operation(trainer, message)

    def _run_operation(self, trainer: Trainer, message: messages.TrainerOp) -> bytes:
        match message:
            case messages.RunPass(_, _, batch):
                return _run_pass(trainer, batch)
            case messages.StepOptimizer(_, _, adam):
                return encode_metrics(trainer.optim_step(adam))
            case messages.DiscardGradients():
                trainer.discard_gradient()
            case messages.SaveState(_, _, saved):
                with self._open_shared(lambda: self._files.create_state(saved)) as folder:
                    trainer.save(folder)
            case messages.LoadState(_, _, saved, optimizer):
                with self._open_shared(lambda: self._files.open_state(saved)) as folder:
                    trainer.load_into(folder, optimizer)
            case messages.PublishWeights(op, model, version, durable, stock):
                if self._ranks is not None:
                    self._publish_part(trainer, message)
                    return b""
                meta = lora_meta(trainer.meta.lora)
                self._publishing.begin(
                    Publication(op, model, version, trainer.weights(), meta, durable, stock)
                )
        return b""

    def _publish_part(self, trainer: Trainer, message: messages.PublishWeights) -> None:
        """Write this rank's slices; the version's own file has no tensors and makes it visible."""
        assert self._ranks is not None and self._link is not None
        op, version, ranks = message.op, message.version, self._ranks.layout.ranks
        meta, durable = lora_meta(trainer.meta.lora), message.durable
        store = self._files.weights()
        self._link.begin_version(
            op, lambda: store.publish(version, {}, {**meta, "parts": ranks}, durable=durable)
        )
        part = part_of(version, self._ranks.rank, ranks)
        slices = trainer.weight_slices()
        self._publishing.begin(
            Publication(op, message.model, part, slices, meta, durable, stock=False)
        )

    def _open_shared(
        self, open_folder: Callable[[], contextlib.AbstractContextManager[Path]]
    ) -> contextlib.AbstractContextManager[Path]:
        return open_folder() if self._link is None else self._link.share_folder(open_folder)

    def _restore_trainer(self, saved: str, source: str) -> Trainer:
        base = self._files.model(source) if source else None
        with self._open_shared(lambda: self._files.open_state(saved)) as folder:
            return Trainer.load(
                folder, source=base, dtype=self._dtype, device=self._device, ranks=self._ranks
            )

    def _create_trainer(self, message: messages.CreateModel) -> Trainer:
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


def _publish_failure(op: int, error: Exception) -> messages.OpFailed:
    """The failure of a publish; the model's state is unchanged."""
    failure = _op_failed(op, error, state_lost=False)
    if failure.owner == "server":
        logger.error("version not written: %s", error, exc_info=error)
    return failure


def _op_failed(op: int, error: Exception, *, state_lost: bool) -> messages.OpFailed:
    """Refusals are the user's; the state may be lost by any other error."""
    if isinstance(error, SlackwaterError) and not isinstance(error, UnavailableError):
        return messages.OpFailed(op, str(error), "user", state_lost=False)
    reason = f"{type(error).__name__}: {error}"
    return messages.OpFailed(op, reason, "server", state_lost=state_lost)


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
    logprobs = [Array.from_numpy(values) for values in output.logprobs]
    return encode_result(PassResult(logprobs, dict(output.metrics)))


def main() -> None:
    parser = base_parser("A trainer worker; `slackwater up` starts it.")
    parser.add_argument("--dtype", default="float32", help="what nets compute in; masters are fp32")
    parser.add_argument("--one-site", action="store_true", help="send no dense deltas")
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
            stocker = RelayPublisher(
                address_of(options.relay),
                node_secret().encode(),
                dense_deltas=not options.one_site,
            )
        resident = resident_models(options.worker, options.device)
        TrainerWorker(
            connection, files, options.device, options.dtype, stocker, options.node, resident
        ).run()


if __name__ == "__main__":
    run_worker(main)
