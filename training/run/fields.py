"""Values of TOML as the fields of dataclasses: their types and ranges."""

from typing import Any, get_args, get_origin, get_type_hints

from dalle_lean.errors import UserError


def typed_section(section: type, values: dict[str, Any]) -> Any:
    """`section(**values)` once every key is known and every value has its field's type."""
    hints = get_type_hints(section)
    given = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"{name}: unknown key; known are {', '.join(hints)}")
        try:
            given[name] = typed(value, hints[name])
        except (TypeError, ValueError):
            words = getattr(hints[name], "__name__", None) if not get_args(hints[name]) else str(hints[name])
            raise UserError(f"{name} = {value!r}: must be of type {words}") from None
    return section(**given)


def typed(value: Any, hint: Any) -> Any:
    """A value of TOML or JSON as a field of this type takes it; 0 and "" are None where the field may be None."""
    arguments = get_args(hint)
    if type(None) in arguments:
        unset = value is None or (value in (0, "") and not isinstance(value, bool))
        return None if unset else typed(value, arguments[0])
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        items = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return tuple(typed(part, item) for part, item in zip(value, items, strict=True))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise TypeError
    return value


def check_at_least(minimum: float, **values: float) -> None:
    """ValueError that names the first of `values` below `minimum`."""
    for name, value in values.items():
        if not minimum <= value < float("inf"):
            raise UserError(f"{name} = {value}: must be a finite number of at least {minimum}")


def check_fields(section: Any, minimum: float, *names: str) -> None:
    """ValueError that names the first of these fields below `minimum`."""
    check_at_least(minimum, **{name: getattr(section, name) for name in names})


def check_one_of(allowed: tuple[str, ...], **values: str) -> None:
    """ValueError that names the first of `values` outside `allowed`."""
    for name, value in values.items():
        if value not in allowed:
            raise UserError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")
