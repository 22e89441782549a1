"""The modules of a report as a tree whose totals add up, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fa_advisor.records import ATTENTION_CATEGORIES, ModuleMemory


@dataclass(slots=True)
class Node:
    """A module: the bytes it made itself, and with its children's."""

    fqn: str
    name: str
    type: str = ""
    own: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    children: list[Node] = field(default_factory=list)

    @property
    def own_bytes(self) -> int:
        """What this module itself made."""
        return sum(self.own.values())

    @property
    def bytes(self) -> int:
        """This module and everything in it."""
        return sum(self.total.values())

    @property
    def attention_bytes(self) -> int:
        """Attention's N x N intermediates, this module and everything in it."""
        return sum(self.total.get(category, 0) for category in ATTENTION_CATEGORIES)


def build(modules: Iterable[ModuleMemory]) -> Node:
    """The root ("") with every module below it; parents that the report skips are filled in."""
    root = Node("", "(model)")
    nodes = {"": root}
    for module in modules:
        node = _find(nodes, module.fqn)
        node.type = node.type or module.type
        _add(node.own, module.categories)
    ordered = _parents_first(root)
    for node in ordered:
        node.total = dict(node.own)
    for node in reversed(ordered):
        for child in node.children:
            _add(node.total, child.total)
    return root


def rows(
    root: Node, opened: set[str], order: Callable[[Node], object] | None
) -> list[tuple[Node, int]]:
    """The visible nodes with their depths, siblings in `order` (None: the model's)."""
    out: list[tuple[Node, int]] = []
    stack = [(root, 0)]
    while stack:
        node, depth = stack.pop()
        out.append((node, depth))
        if node.fqn in opened:
            children = node.children
            if order is not None:
                children = sorted(children, key=order)  # type: ignore[arg-type]
            stack.extend((child, depth + 1) for child in reversed(children))
    return out


def open_until(root: Node, limit: int) -> set[str]:
    """What to open at first: level by level, as long as at most `limit` rows show."""
    opened: set[str] = set()
    shown, level = 1, [root]
    while level:
        below = [child for node in level for child in node.children]
        shown += len(below)
        if shown > limit and opened:
            break
        opened.update(node.fqn for node in level if node.children)
        level = below
    return opened


def parents(root: Node) -> set[str]:
    """Every node that has children."""
    return {node.fqn for node in _parents_first(root) if node.children}


def _find(nodes: dict[str, Node], fqn: str) -> Node:
    """The node of `fqn`, made with its parents where there is none."""
    missing = []
    while fqn not in nodes:
        missing.append(fqn)
        fqn = fqn.rpartition(".")[0]
    node = nodes[fqn]
    for name in reversed(missing):
        child = Node(name, name.rpartition(".")[2] or name)
        nodes[name] = child
        node.children.append(child)
        node = child
    return node


def _parents_first(root: Node) -> list[Node]:
    ordered, at = [root], 0
    while at < len(ordered):
        ordered.extend(ordered[at].children)
        at += 1
    return ordered


def _add(into: dict[str, int], more: dict[str, int]) -> None:
    for category, count in more.items():
        into[category] = into.get(category, 0) + count
