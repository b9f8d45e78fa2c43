"""What a learner's process says in a join, and what the answer to its first one settles."""

from __future__ import annotations

from msgspec.structs import replace

from dd_lightning.protocol.held import Held
from dd_lightning.protocol.messages import ApplyDone, Join, Welcome


def join_of(
    template: Join,
    held: Held,
    wants_state: bool,
    unheard: tuple[ApplyDone, ...] = (),
    **now: int | str,
) -> Join:
    """The join of what is held. `now`: number, run_id, generation and epoch of this one."""
    continues = bool(held.versions)
    by_itself = continues and not template.cut and not wants_state
    return replace(
        template,
        continues=continues,
        step=held.step,
        odometer=held.odometer,
        data_position=max(template.data_position, held.data_position),
        versions=held.versions,
        pending=held.pending if continues else (),
        unheard=unheard if continues else (),
        wants_state=wants_state,
        state_from="self" if by_itself else template.state_from,
        **now,
    )


def settle_cut(template: Join, held: Held, welcome: Welcome) -> tuple[Join, Held]:
    """A process restored from its part of a cut has heard whether the run was too: it carries that
    account on from now on; or it is an ordinary newcomer with a checkpoint, holding nothing."""
    if not template.cut:
        return template, held
    if not welcome.cut:
        held = Held(template.step, 0, (), ())
    former = template.former if welcome.cut else ""
    return replace(template, cut="", former=former, odometer=0, versions=(), pending=()), held
