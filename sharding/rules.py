"""Logical axis names mapped to mesh axes, and the sizes that can be split."""

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from sharding.mesh import AXES

# What each logical axis is split over: one mesh axis, several (major first), or nothing.
Rules = Mapping[str, str | tuple[str, ...] | None]


def partition_spec(axes: Sequence[str | None], rules: Rules) -> PartitionSpec:
    """PartitionSpec of an array whose dimensions carry the logical names `axes`.

    A dimension named None is not split.
    Raises: ValueError for a logical axis without a rule, a rule that names no mesh axis, and a
    mesh axis that would split two dimensions.
    """
    entries: list[str | tuple[str, ...] | None] = []
    used: dict[str, str] = {}
    for axis in axes:
        if axis is None:
            entries.append(None)
            continue
        if axis not in rules:
            raise ValueError(f"logical axis {axis!r} has no rule; known: {sorted(rules)}")
        rule = rules[axis]
        mesh_axes = () if rule is None else (rule,) if isinstance(rule, str) else tuple(rule)
        for mesh_axis in mesh_axes:
            if mesh_axis not in AXES:
                raise ValueError(
                    f"rule for logical axis {axis!r}: expected mesh axes out of {AXES}, "
                    f"got {mesh_axis!r}"
                )
            if mesh_axis in used:
                raise ValueError(
                    f"axes {tuple(axes)}: mesh axis {mesh_axis!r} splits both {used[mesh_axis]!r} "
                    f"and {axis!r}; it can split one dimension"
                )
            used[mesh_axis] = axis
        entries.append(mesh_axes[0] if len(mesh_axes) == 1 else mesh_axes or None)
    return PartitionSpec(*entries)


def check_tensor(
    num_heads: int, num_kv_heads: int, tensor: int, expert: int = 1, **divided: int
) -> None:
    """Check that heads, and whatever else is `divided`, can be split over a stage's devices.

    Those are tensor x expert, as if they were one axis. Query heads are divided. Kv heads are
    divided too, or, where there are fewer than devices, each is kept on neighbouring devices. All
    are checked together, so that the sizes an error offers are sizes that work.
    Raises: ValueError that lists the valid sizes.
    """

    def fits(size: int) -> bool:
        divides_kv = num_kv_heads % size == 0 or size % num_kv_heads == 0
        whole = [num_heads, *divided.values()]
        return divides_kv and all(extent % size == 0 for extent in whole)

    if not fits(tensor * expert):
        valid = ", ".join(str(size) for size in range(1, num_heads + 1) if fits(size))
        others = "".join(f", {name} {extent}" for name, extent in divided.items())
        over = (
            f"tensor={tensor}; valid sizes"
            if expert == 1
            else (f"expert={expert} x tensor={tensor}; valid products")
        )
        raise ValueError(
            f"{num_heads} query heads and {num_kv_heads} kv heads{others} cannot be split over "
            f"{over}: {valid}"
        )


def check_experts(
    count: int, expert: int, expert_mlp_width: int, tensor: int, unit: int = 1
) -> None:
    """Check that whole experts can be split over `expert` devices, and their insides over `tensor`.

    `unit` columns of an expert stay together: those that share a scale.
    Raises: ValueError that lists the valid sizes of the axis.
    """
    if count % expert:
        raise ValueError(
            f"{count} experts cannot be split over expert={expert}; valid sizes: {_divisors(count)}"
        )
    units, rest = divmod(expert_mlp_width, unit)
    if rest:
        raise ValueError(f"expert MLP width: expected a multiple of {unit}, got {expert_mlp_width}")
    if units % tensor:
        whole = f" in units of {unit}" if unit > 1 else ""
        raise ValueError(
            f"expert MLP width {expert_mlp_width}{whole} cannot be split over tensor={tensor}; "
            f"valid sizes: {_divisors(units)}"
        )


def _divisors(extent: int) -> str:
    return ", ".join(str(size) for size in range(1, extent + 1) if extent % size == 0)
