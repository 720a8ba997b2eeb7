"""How many runs an exploration stands for.

A *run* is a complete order of events; a *trace* is what remains of it when events at different
actors, neither of which caused the other, may change places: one run each.
"""

from tests.simulation.exhaustive.search import Composition


def runs(composition: Composition) -> int:
    """All complete orders of events: ways through the graph of states."""
    counts: dict[int, int] = {}
    stack = [(composition.first(), False)]
    while stack:
        state, ready = stack.pop()
        if state in counts and not ready:
            continue
        after = [new for _, _, new in composition.steps(state)]
        if ready:
            counts[state] = sum(counts[new] for new in after) if after else 1
        else:
            stack.append((state, True))
            stack.extend((new, False) for new in after if new not in counts)
    return counts[composition.first()]


def traces(composition: Composition) -> int:
    """Complete runs, one for each trace: of those that only differ by the order of independent
    events the search with sleep sets (Godefroid 1996) goes through one."""
    counts: dict[tuple[int, frozenset[tuple[int, int]]], int] = {}
    first = (composition.first(), frozenset[tuple[int, int]]())
    stack = [(first, False)]
    while stack:
        node, ready = stack.pop()
        if node in counts and not ready:
            continue
        state, asleep = node
        after, slept, enabled = [], dict.fromkeys(asleep), 0
        for actor, choice, new in composition.steps(state):
            enabled += 1
            if (actor, choice) not in asleep:
                kept = frozenset(other for other in slept if other[0] != actor)
                after.append((new, kept))
                slept[actor, choice] = None
        if ready:
            counts[node] = sum(counts[one] for one in after) if enabled else 1
        else:
            stack.append((node, True))
            stack.extend((one, False) for one in after if one not in counts)
    return counts[first]
