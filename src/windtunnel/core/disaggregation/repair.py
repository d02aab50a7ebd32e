"""What follows for lanes and transfers that are still there when a replica or a link of prefill and decode pools fails:
the rules of their schedulers, which Python calls between two calls of the loop."""

from windtunnel.core.compiled import entry, part
from windtunnel.core.disaggregation.link import ACTIVE, Transfers, drop_transfer, share_anew, start_transfer
from windtunnel.core.disaggregation.order import Order, wake
from windtunnel.core.disaggregation.passage import find_gone, free_prompt, hand_back, lose
from windtunnel.core.disaggregation.reservation import give_up
from windtunnel.core.dispatch import unstage
from windtunnel.core.log import hold_until
from windtunnel.core.queues import withdraw
from windtunnel.core.records import Array, State
from windtunnel.core.routing import note_end
from windtunnel.core.step import uncount

CUT, SEND, FREE, UNASK, UNCOME, GONE_THERE, LOSE, LET_GO = range(8)
"""What is done about a request: its transfer leaves the NICs; it begins; the prefill lane frees the blocks of its
prompt; the decode lane takes back what it has for it; the prefill lane no longer waits for the decode lane; the decode
lane finds that its KV is gone; it ends with the link; a row that was left behind is freed."""


@part
def take_back(state: State, transfers: Transfers, row: int, time: float) -> None:
    """A decode lane takes a request out of those that ask, or takes back its memory."""
    lane = state.lanes[state.requests[row].lane]
    hold_until(state.pools[state.groups[lane.group].pool], lane, time, lane.free)
    if transfers.handed[row - len(transfers.handed)].admitted >= 0.0:
        unstage(state, state.pools[state.groups[lane.group].pool], lane, row)
        lane.staged -= 1
        lane.coming -= 1
    else:
        withdraw(lane, state.requests, row)
    lane.refused = 0


@part
def unask(state: State, order: Order, course: Array, transfers: Transfers, second: State, r: int, time: float) -> None:
    """A decode lane has nothing more to do with a request."""
    row = len(transfers.handed) + r
    take_back(state, transfers, row, time)
    lane = state.lanes[state.requests[row].lane]
    uncount(lane, state.requests, row)
    note_end(state, second.routing, row)
    if lane.outstanding > 0:
        wake(state, second, order, course, lane.group, time)


@part
def cut(transfers: Transfers, r: int, time: float) -> None:
    """A transfer that is under way is no more; those that share its NICs are faster."""
    shares = False
    for k in range(transfers.counts[ACTIVE]):
        shares |= transfers.active[k] == r
    if shares:
        drop_transfer(transfers, r, time)
    elif transfers.rules[0].fair:
        share_anew(transfers, r, time, 0)


@entry
def repair(
    state: State, order: Order, course: Array, transfers: Transfers, second: State, what: int, r: int, time: float
) -> None:
    """Do one of the things above about request ``r`` at ``time``; for LET_GO ``r`` is the row."""
    n = len(transfers.handed)
    if what == CUT:
        cut(transfers, r, time)
    elif what == SEND:
        start_transfer(transfers, r, time)
    elif what == FREE:
        free_prompt(state, order, course, transfers, second, r, time)
    elif what == UNASK:
        unask(state, order, course, transfers, second, r, time)
    elif what == UNCOME:
        lane = state.lanes[transfers.handed[r].prefill_lane]
        lane.coming -= 1
        uncount(lane, state.requests, r)
        note_end(state, state.routing, r)
    elif what == GONE_THERE:
        lane = state.lanes[state.requests[n + r].lane]
        hold_until(state.pools[state.groups[lane.group].pool], lane, time, lane.free)
        give_up(state, transfers, state.pools[state.groups[lane.group].pool], lane, r, time)
        lane.refused = 0
        find_gone(state, order, course, transfers, second, r, time)
    elif what == LOSE:
        take_back(state, transfers, n + r, time)
        lose(state, order, course, transfers, second, r, time)
    else:
        lane = state.lanes[state.requests[r].lane]
        state.requests[r].holds = 0
        hand_back(state, state.pools[state.groups[lane.group].pool], lane, r, time)
        if lane.outstanding > 0:
            wake(state, second, order, course, lane.group, time)
