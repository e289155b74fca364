"""An independent reading of an op list: every pair of ops that touches a resource must be ordered by dependencies."""

from collections.abc import Iterable, Iterator

from engine.schedule.ops import Op
from engine.schedule.resources import Resource


def races(ops: Iterable[Op]) -> Iterator[str]:
    """Violations: a dependency on a later op, or two ops on one resource, one of them writing, that no chain orders.

    Follows the transitive closure of the dependencies alone: lanes may complete out of order.
    """
    items = list(ops)
    position = {op.id: i for i, op in enumerate(items)}
    ancestors: list[int] = []
    touched: dict[Resource, list[tuple[int, bool]]] = {}
    for i, op in enumerate(items):
        before = 0
        for dep in op.deps:
            parent = position.get(dep)
            if parent is None or parent >= i:
                yield f"op {op.id} ({op.action.name}) depends on op {dep}, which is not before it"
                continue
            before |= ancestors[parent] | (1 << parent)
        ancestors.append(before)
        accesses = [(resource, False) for resource in op.reads] + [(resource, True) for resource in op.writes]
        for resource, writing in accesses:
            for other, wrote in touched.get(resource, ()):
                if other != i and (writing or wrote) and not before >> other & 1:
                    first = items[other]
                    yield f"op {op.id} ({op.action.name}) and op {first.id} ({first.action.name}) race on {resource}"
            touched.setdefault(resource, []).append((i, writing))
