"""The Lightning strategy: the user's own, plus one thing, the step boundary after `optimizer_step`.

Only hooks are here; what happens in them is `session.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

from dd_lightning.crash_points import reach
from dd_lightning.learner import after_join, data_position, folders, own_checkpoint, schedules
from dd_lightning.learner.address import identify
from dd_lightning.learner.beginning import open_session
from dd_lightning.learner.cut import TakeCuts
from dd_lightning.learner.cut_shards import shard_files
from dd_lightning.learner.distributed_files import is_distributed, load_in_one
from dd_lightning.learner.global_weights import GlobalValidation
from dd_lightning.learner.group import Group
from dd_lightning.learner.group_inner import inner_state
from dd_lightning.learner.group_session import FollowingSession
from dd_lightning.learner.group_stop import SharedStop
from dd_lightning.learner.hand_in import HandInFirst
from dd_lightning.learner.over_inner import OverInner
from dd_lightning.learner.sampler import check_mode
from dd_lightning.learner.session import LearnerSession
from dd_lightning.learner.step_counter import StepCounter
from dd_lightning.learner.surroundings import Surroundings
from dd_lightning.learner.tokens import TokenCounter
from dd_lightning.learner.traffic import Traffic


class DecoupledDiLoCoStrategy(OverInner):
    """Trains this Trainer's model as one learner of a Decoupled DiLoCo run.

    What a failure costs: a syncer that is away, nothing (work is kept and handed in on its
    return); a learner killed, its tokens since its last contribution. Its data goes on where it was
    last heard of if the datamodule has `skip_to(batches)`, see `data_position.py`.

    Args:
        syncer: address, "tcp://HOST:PORT"; default: DD_SYNCER.
        learner: id in the run, the same after a restart; default: DD_LEARNER, else the host name.
        inner: "auto", "ddp", "ddp_spawn", "fsdp", "fsdp2", "single_device", or a strategy object
            whose options are kept; `inner.py` says what of other classes. "auto" is DDP over the
            devices, and without a process group where that is one. Rank 0 alone talks to the
            syncer; a rank that is lost ends this learner, never another.
        key: path of this learner's key file (`dd-lightning keys new`); default: DD_KEY. With it the
            channel is encrypted, and only the syncer whose key the file holds is talked to.
        tokens: tokens of a batch, where the module has no `count_tokens(batch)`; default: the
            attention mask's sum, else the elements of `input_ids`, else the batch size.
        data: "seed" (an order of its own), "shard" (disjoint parts) or "none", see `sampler.py`.
        connect_timeout: bound on the first connection (seconds or timedelta), after which `fit`
            raises ConnectionError. Later interruptions have no bound.
        takeover: join although a living learner holds the id.
        data_slot: part of the data in the run, 0 to max_learners - 1; default: the syncer's choice.
        validate_global: at every validation of a fit, evaluate the newest Θ too, before the
            learner's own weights; what the module logs then has "global/" before its name.
        ckpt_weights_only: passed on to the loading of checkpoints; False lets `fit(ckpt_path=...)`
            take a file that holds more than plain values and tensors (a DictConfig among the
            hyperparameters), so only files you trust. Default: what Lightning was told.

    Raises:
        ValueError: an argument that is not allowed.
    """

    surroundings: Surroundings | None = None  # None: real clock and sockets

    def __init__(
        self,
        syncer: str | None = None,
        learner: str | int | None = None,
        inner: str | Strategy = "auto",
        *,
        key: str | None = None,
        tokens: Callable[[Any], int] | None = None,
        data: str = "seed",
        connect_timeout: float | timedelta = 60.0,
        takeover: bool = False,
        data_slot: int | None = None,
        validate_global: bool = False,
        ckpt_weights_only: bool | None = None,
    ) -> None:
        if not getattr(self, "_has_inner", False):
            super().__init__()
        seconds = connect_timeout
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        if not seconds > 0:
            raise ValueError(f"connect_timeout is {connect_timeout!r}; allowed: seconds above 0.")
        self.identity = identify(syncer, learner, key)
        self.data = check_mode(data)
        self.tokens, self.connect_timeout_s = tokens, float(seconds)
        self.takeover, self.data_slot = takeover, data_slot
        self.validate_global, self.ckpt_weights_only = validate_global, ckpt_weights_only
        self.group: Group | None = None  # of more than one process
        self._session: LearnerSession | FollowingSession | None = None
        self._restored: dict[str, Any] | None = None
        self._without_folder: list[Any] = []  # checkpoint callbacks that were given none
        self._has_file = False  # a checkpoint was loaded, ours or plain Lightning's
        self._data_restored = False  # a LightningDataModule had a state in the checkpoint
        self._counter: StepCounter | None = None
        self._global: GlobalValidation | None = None
        self._first: HandInFirst | None = None
        self._cuts: TakeCuts | None = None  # among the Trainer's callbacks while it trains

    @property
    def inner_name(self) -> str:
        """Class name of the Lightning strategy that trains inside this learner."""
        bases = [base for base in type(self).__mro__ if base.__module__.startswith("lightning.")]
        return bases[0].__name__

    @property
    def given_slot(self) -> int:
        """The part of the data that the syncer gave this learner, once it has joined."""
        welcome = self._joined.welcome
        assert welcome is not None  # an open session has one
        return welcome.data_slot

    @property
    def given_data_position(self) -> int:
        """Micro-batches of its data that were drawn before, as far as the syncer has heard."""
        welcome = self._joined.welcome
        assert welcome is not None  # an open session has one
        return welcome.data_position

    @property
    def boundary_s(self) -> float | None:
        """Seconds that the last step boundary took, waits not counted; None before the first."""
        return self._joined.boundary_s

    @property
    def traffic(self) -> Traffic:
        """What has gone to the syncer and come from it; of a group, on rank 0."""
        return self._joined.traffic

    # ------------------------------------------------------------------ beginning

    def setup_environment(self) -> None:
        """The first hook of a fit: no callback has chosen its folder yet."""
        self._without_folder = folders.without_folder(self._trainer)
        super().setup_environment()

    def model_to_device(self) -> None:
        """Then join: the last moment before optimizers (and with them the sampler) are set up."""
        super().model_to_device()
        if not self.restore_checkpoint_after_setup:
            self._join()

    def barrier(self, name: str | None = None) -> None:
        """Where a checkpoint is loaded into sharded parameters, so after the optimizers were set
        up, this is the first hook that knows where the learner goes on from."""
        super().barrier(name)
        if name == "run-stage" and self.restore_checkpoint_after_setup:
            self._join()
        if name == own_checkpoint.ALL_LOADED and self._trainer.state.fn == TrainerFn.FITTING:
            ranks = self.global_rank, getattr(self, "world_size", 1)
            own_checkpoint.begin_rng(self._restored, self.identity.learner, *ranks)

    def _join(self) -> None:
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if self._is_group:
            self.group = Group(getattr(self, "_timeout", None), SharedStop(trainer))
            self.group.stop.listen()
        folders.claim(trainer, self.identity.learner, self._without_folder)
        self._session = open_session(self, trainer, self._restored, wants_state=not self._has_file)
        data_position.begin(self._session, trainer.datamodule)
        if self._session.is_alone or self.data == "none":
            self._leave_sampler_alone(trainer)
        after_join.tell(trainer)

    def _leave_sampler_alone(self, trainer: Any) -> None:
        """Subclasses whose sampler Lightning would replace stop it from doing so."""

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, session, restored = self._trainer, self._joined, self._restored
        if self.group is not None:
            self.group.stop.listen()
        self._counter = StepCounter(
            TokenCounter(self.lightning_module, self.tokens),
            self.optimizers,
            getattr(self.precision_plugin, "scaler", None),
            automatic=self._automatic,
            batches=session.data_position,
        )
        boundary = None if self._automatic else self._boundary
        learner, shards = self.identity.learner, shard_files(self)
        self._cuts = TakeCuts(session, self._counter, learner, boundary, shards)
        trainer.callbacks.append(self._cuts)
        self._first = HandInFirst(self._hand_in)
        trainer.callbacks.insert(0, self._first)
        if self.validate_global:
            self._global = GlobalValidation(trainer, session.pause, session.weights.swap)
        session.load()
        session.exchange(inner_state(trainer.lightning_module, self.optimizers, self.group))
        if restored is not None:
            own_checkpoint.go_on(restored, trainer, self.identity.learner, self._data_restored)
        elif not self._has_file:
            schedules.advance(trainer, session.steps)
        self._stop_if_done()

    # ------------------------------------------------------------------ training

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if self._counter is not None and args:
            self._counter.saw(args[0], output)
            self._joined.data_position = self._counter.batches
        return output

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        session = self._joined
        if not self._automatic:
            session.before_step()
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def with_copies_finished() -> Any:
            output = closure()  # forward and backward, beside which copies go on
            session.before_step()
            return output

        output = super().optimizer_step(optimizer, with_copies_finished, model, **kwargs)
        self._boundary()
        return output

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if not self._automatic:
            self._boundary()
        session = self._joined
        if batch_idx == 0:
            session.begin_epoch()
        session.clock.begin(session.now())

    def _boundary(self) -> None:
        """After an optimizer step (under manual optimization: before the next batch)."""
        session, counter = self._joined, self._counter
        assert counter is not None  # made in on_train_start
        if counter.has_stepped():
            tokens, loss = counter.take()
            session.step(tokens if self._counts_tokens else 0, loss)
        else:
            session.poll()
        if session.reset_inner:
            for optimizer in self.optimizers:
                optimizer.state.clear()
            session.reset_inner = False
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        trainer, session = self._trainer, self._joined
        if session.finish_reason or 0 < trainer.max_steps <= session.steps:
            trainer.should_stop = True

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._is_training:
            self._joined.pause()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self._is_training:
            self._joined.resume()

    # ------------------------------------------------------------------ end

    def _hand_in(self) -> None:
        """The last step is done; callbacks and module have not heard of the end yet."""
        session = self._joined
        if not self._automatic:
            self._boundary()
        session.finish(session.finish_reason or "done")

    def on_train_end(self) -> None:
        super().on_train_end()
        self._close("finished")

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        said = f"{type(exception).__name__}: {exception}"[:200]
        # To a rank it is a RuntimeError when another is lost, whatever ended that one: this learner
        # has died, and as one that was killed it is expected back instead of saying goodbye.
        has_died = self.group is not None and isinstance(exception, RuntimeError)
        self._close("" if has_died else said)

    def teardown(self) -> None:
        self._close("teardown")
        super().teardown()

    def _close(self, reason: str) -> None:
        """Idempotent, within `timeouts.shutdown`; without a reason nothing is said."""
        session, self._session = self._session, None
        if self._cuts is not None and session is not None:
            self._trainer.callbacks.remove(self._first)
            self._trainer.callbacks.remove(self._cuts)
            self._cuts.close(session.config.timeouts.shutdown)
            self._cuts = None
        if self._counter is not None:
            self._counter.close()
            self._counter = None
        if self._global is not None:
            self._global.close()
            self._global = None
        self._restored, self._has_file = None, False
        if session is not None:
            session.close(reason)

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        state = None if self._session is None else self._session.state()
        if state is not None:  # rank 0's is written
            if self._counter is not None and self._counter.step_is_open:
                state["step"] += 1  # manual optimization: its boundary comes with the next batch
            checkpoint[own_checkpoint.CHECKPOINT_KEY] = state
        reach("learner.checkpoint_begun")
        self._write(checkpoint, filepath, storage_options)
        reach("learner.checkpoint_written")
        if self._session is not None:
            self._session.checkpointed()

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if self.ckpt_weights_only is not None:
            weights_only = self.ckpt_weights_only
        read = super().load_checkpoint
        if is_distributed(checkpoint_path) and not self.restore_checkpoint_after_setup:
            read = load_in_one
        checkpoint = read(checkpoint_path, weights_only=weights_only)
        self._has_file = True
        self._restored = own_checkpoint.take_out(checkpoint, self.identity.learner)
        self._data_restored = type(self._trainer.datamodule).__qualname__ in checkpoint
        return checkpoint

    # ------------------------------------------------------------------ pieces

    def __getstate__(self) -> dict[str, Any]:
        """Without threads and sockets."""
        gone = ("_session", "_counter", "_cuts", "_first", "_global", "group")
        return {**self.__dict__, **dict.fromkeys(gone)}

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None  # connected before any hook
        return self.lightning_module.trainer

    @property
    def _is_group(self) -> bool:
        """Whether this learner has a process group."""
        return False

    @property
    def _counts_tokens(self) -> bool:
        """Whether this rank's batches are not another rank's too."""
        return True

    @property
    def _automatic(self) -> bool:
        return bool(self.lightning_module and self.lightning_module.automatic_optimization)

    @property
    def _joined(self) -> LearnerSession | FollowingSession:
        assert self._session is not None  # joined in model_to_device, left in on_train_end
        return self._session

    @property
    def _is_training(self) -> bool:
        """Or validating within it, on the learner's own weights."""
        on_theta = self._global is not None and self._global.is_running
        return self._session is not None and not self._trainer.sanity_checking and not on_theta


# every object is of a derived class, which is whole; LightningCLI takes no abstract one
DecoupledDiLoCoStrategy.__abstractmethods__ = frozenset()
