"""The collectives that a compiled program runs, read from its text.

XLA prints a program as computations that call each other: loops say how often they run, and an
asynchronous collective is a start and a done. The counts here are of one run of the program.
"""

import collections
import dataclasses
import math
import re

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One kind of collective over groups of `devices`, as often as a device takes part.

    Units: `result_bytes` and `sent_bytes` of one device and all `count` together. `sent_bytes` are
    what a device puts on its links in a ring: (n - 1) / n of an array to gather or to scatter it,
    twice that to sum it, all of it to hand it on.
    """

    kind: str
    devices: int
    count: int
    result_bytes: int
    sent_bytes: float


def collectives(text: str) -> tuple[Collective, ...]:
    """The collectives of an optimised program, `jax.stages.Compiled.as_text()`, by kind and group.

    Of the branches of a condition the one with most bytes counts.
    Raises: ValueError where a loop with collectives does not say how often it runs.
    """
    computations, entry = _computations(text)
    totals = _Counter(computations).run(entry)
    return tuple(
        Collective(kind, devices, int(count), int(result), sent)
        for (kind, devices), (count, result, sent) in sorted(totals.items())
    )


def sent_bytes(found: tuple[Collective, ...]) -> float:
    """What a device puts on its links in one run."""
    return sum(each.sent_bytes for each in found)


Totals = dict[tuple[str, int], tuple[float, float, float]]

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<op>[a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LISTED_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUP = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH_GROUP = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\] \{(?P<axes>[^}]*)\}")
_AXIS = re.compile(r"'(\w+)'(?:=(\d+))?")
_OPERAND = re.compile(r"\(\s*(?:[^%()]*?)%?([\w.\-]+)")


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of every computation by name, and the name of the one that runs."""
    computations: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            lines = computations.setdefault(header["name"], [])
            entry = header["name"] if header["entry"] else entry
        elif line.startswith(" "):
            lines.append(line)
    if not entry:
        raise ValueError("text: expected an optimised program with an ENTRY computation")
    return computations, entry


class _Counter:
    def __init__(self, computations: dict[str, list[str]]) -> None:
        self._computations = computations
        self._known: dict[str, Totals] = {}

    def run(self, name: str) -> Totals:
        """What one run of a computation does."""
        if name not in self._known:
            totals: Totals = collections.defaultdict(lambda: (0.0, 0.0, 0.0))
            lines = self._computations[name]
            results = {
                found["name"]: found["type"] for line in lines if (found := _LINE.match(line))
            }
            done = {_operand(line): line for line in lines if "-done(" in line}
            for line in lines:
                self._add(totals, line, results, done)
            self._known[name] = dict(totals)
        return self._known[name]

    def _add(
        self, totals: Totals, line: str, results: dict[str, str], done: dict[str, str]
    ) -> None:
        found = _LINE.match(line)
        if found is None:
            return
        op = found["op"]
        kind = op.removesuffix("-start")
        if kind in KINDS:
            # The start of an asynchronous collective returns its operand too; its done does not.
            own = found["type"]
            if op.endswith("-start"):
                finish = _LINE.match(done[found["name"]])
                assert finish is not None
                own = finish["type"]
            size = _bytes(own)
            devices = _group_size(line, kind)
            _merge(totals, {(kind, devices): (1.0, size, _sent(kind, devices, size))}, 1)
        elif op == "conditional":
            branches = [
                name.strip().removeprefix("%")
                for listed, single in _BRANCHES.findall(line)
                for name in (listed or single).split(",")
            ]
            runs = [self.run(branch) for branch in branches]
            _merge(totals, max(runs, key=lambda run: sum(sent for *_, sent in run.values())), 1)
        elif op in ("while", "call", "fusion", "async-start"):
            for called in _CALLED.findall(line):
                inner = self.run(called)
                if inner:
                    _merge(totals, inner, _trips(line) if op == "while" else 1)


def _merge(totals: Totals, more: Totals, times: int) -> None:
    for key, values in more.items():
        before = totals.get(key, (0.0, 0.0, 0.0))
        count, result, sent = (a + times * b for a, b in zip(before, values, strict=True))
        totals[key] = (count, result, sent)


def _trips(line: str) -> int:
    trips = _TRIPS.search(line)
    if trips is None:
        raise ValueError(
            "a loop with collectives: expected a known trip count, got none in "
            f"{line.strip()[:120]!r}; count loops that run until a condition by hand"
        )
    return int(trips.group(1))


def _operand(line: str) -> str:
    found = _OPERAND.search(line, line.index("-done("))
    assert found is not None
    return found.group(1)


def _group_size(line: str, kind: str) -> int:
    if kind == "collective-permute":
        return 2  # a source and a target
    if found := _MESH_GROUP.search(line):
        # By name: of the axes of a mesh, over which the devices of a group lie.
        sizes = {name: int(size) for name, size in _AXIS.findall(found["sizes"])}
        return math.prod(sizes[name] for name, _ in _AXIS.findall(found["axes"]))
    for pattern in (_IOTA_GROUP, _LISTED_GROUP):
        if found := pattern.search(line):
            text = found.group(1)
            return len(text.split(",")) if pattern is _LISTED_GROUP else int(text)
    raise ValueError(f"{kind}: expected replica groups, got {line.strip()[:120]!r}")


def _sent(kind: str, devices: int, result_bytes: float) -> float:
    share = (devices - 1) / devices
    factors = {
        "all-reduce": 2 * share,
        "all-gather": share,
        "reduce-scatter": devices - 1,  # of the operand, which is as many times larger
        "all-to-all": share,
        "collective-permute": 1.0,
    }
    return factors[kind] * result_bytes


def _bytes(shape: str) -> float:
    """Bytes of a printed type, an array or a tuple of them."""
    total = 0.0
    for array in _ARRAY.finditer(shape):
        bits = re.search(r"\d+", array["dtype"])
        # pred has no number; f8e4m3fn and the like have it first.
        width = int(bits.group()) if bits else 8
        total += math.prod(int(size) for size in array["sizes"].split(",") if size) * width / 8
    return total
