"""Puts a learner's session together and joins the run with it."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dd_lightning.learner.data_position import can_skip
from dd_lightning.learner.dialing import Bounds, Dialer
from dd_lightning.learner.group_session import FollowingSession, LeadingSession
from dd_lightning.learner.group_values import GroupValues
from dd_lightning.learner.session import LearnerSession
from dd_lightning.learner.snapshots import ModelValues
from dd_lightning.learner.surroundings import Sockets, Surroundings
from dd_lightning.protocol.cut_record import held_in
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import Join, TensorInfo
from dd_lightning.protocol.transfer import CHUNK_BYTES
from dd_lightning.transport.keys import load_dial_keys

if TYPE_CHECKING:
    from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy
    from dd_lightning.transport.learner_channel import LearnerChannel
    from dd_lightning.transport.rendezvous import Rendezvous

WIDEST_BYTES = 8  # of an element: float64


def open_session(
    strategy: DecoupledDiLoCoStrategy,
    trainer: Any,
    restored: Mapping[str, Any] | None,
    *,
    wants_state: bool,
) -> LearnerSession | FollowingSession:
    """Join the run; returns once admitted.

    Args:
        wants_state: no checkpoint was loaded, so a peer's inner state is welcome.

    Raises:
        ConnectionError: no syncer within the strategy's connect timeout, or it refused.
    """
    module = strategy.lightning_module
    assert module is not None  # connected before any hook
    group, identity = strategy.group, strategy.identity
    values = ModelValues(module) if group is None else GroupValues(module, group, strategy.model)
    around = strategy.surroundings or Sockets(partial(dialer, identity.syncer, key=identity.key))
    session: LearnerSession | FollowingSession
    if group is None or group.leads:
        join = _join(strategy, trainer, values, restored, around.incarnation())
        join = msgspec.structs.replace(join, wants_state=wants_state)
        session = _session(strategy, trainer, join, values, around, restored)
    else:
        position = int(restored["data_position"]) if restored else 0
        session = FollowingSession(values, group, around.now, position)
    try:
        session.open()
    except BaseException as error:
        session.close(f"{type(error).__name__} while joining")
        if isinstance(error, ConnectionError) and restored and restored["run_id"] in str(error):
            raise ConnectionError(
                f"{error}. Its checkpoint is of run {restored['run_id']}: to take part in another "
                "one, fit without ckpt_path (or load the weights alone), or join the run it is of."
            ) from error
        raise
    return session


def _session(
    strategy: DecoupledDiLoCoStrategy,
    trainer: Any,
    join: Join,
    values: ModelValues,
    around: Surroundings,
    restored: Mapping[str, Any] | None,
) -> LearnerSession:
    """Of the only process, or of rank 0; not opened."""
    link = LearnerLink(
        join,
        now=around.now(),
        address=strategy.identity.syncer,
        connect_timeout_s=strategy.connect_timeout_s,
        via=strategy.identity.via,
    )
    comm = around.comm(link, values.infos)
    comm.traffic.keeps_theta = strategy.validate_global
    part = restored["cut"] if restored is not None and join.cut else None
    group = strategy.group
    if group is None:
        return LearnerSession(join, link, comm, values, lambda: trainer.received_sigterm, part)
    return LeadingSession(join, link, comm, values, lambda: group.stop.told, part, group=group)


def _join(
    strategy: DecoupledDiLoCoStrategy,
    trainer: Any,
    values: ModelValues,
    restored: Mapping[str, Any] | None,
    incarnation: str,
) -> Join:
    step = int(restored["step"]) if restored else 0
    held: dict[str, Any] = {"step": step}
    if restored and "cut" in restored and restored["learner"] == strategy.identity.learner:
        held = held_in(restored["cut"]["ledger"])
        held |= {"cut": restored["cut"]["id"], "former": restored["incarnation"]}
    return Join(
        learner=strategy.identity.learner,
        incarnation=incarnation,
        number=0,
        takeover=strategy.takeover,
        run_id=str(restored["run_id"]) if restored else "",
        tensors=values.infos,
        dtype=values.main_dtype,
        **held,
        state_from="checkpoint" if restored else "cold",
        state_step=step,
        data_position=int(restored["data_position"]) if restored else 0,
        skips=can_skip(trainer.datamodule),
        data_slot=strategy.data_slot,
        strategy=strategy.inner_name,
        ranks=getattr(strategy, "world_size", 1),
        max_steps=trainer.max_steps if trainer.max_steps > 0 else None,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def dialer(address: str, tensors: tuple[TensorInfo, ...], key: str = "") -> Dialer:
    """Makes channels to whatever syncer the rendezvous at `address` names now.

    Args:
        tensors: of the module; no message is larger than all of them together, or a chunk of state.
        key: path of this learner's key file; "" for a plain channel.
    """
    # imported here: tests of the learner's side bring channels of their own
    from dd_lightning.transport.learner_channel import LearnerChannel
    from dd_lightning.transport.rendezvous import lookup

    keys = load_dial_keys(Path(key)) if key else None
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    most_bytes = max(WIDEST_BYTES * elements, CHUNK_BYTES)

    def open_channel(
        found: Rendezvous, silence_s: Callable[[], float], bounds: Bounds
    ) -> LearnerChannel:
        return LearnerChannel(
            found,
            max_message_bytes=most_bytes,
            keys=keys,
            silence_s=silence_s,
            dial_timeout_s=bounds.dial_s,
            connect_timeout_s=bounds.whole_s,
        )

    return Dialer(lambda timeout_s, before_s: lookup(address, timeout_s, before_s), open_channel)
