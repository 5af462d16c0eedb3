"""Values from TOML -> the fields of dataclasses, by type."""

from typing import Any, get_args, get_origin, get_type_hints

from dalle_lean.errors import UserError


def typed_section(section: type, values: dict[str, Any]) -> Any:
    """Return `section(**values)`; UserError for an unknown key or a value of the wrong type, by name."""
    hints = get_type_hints(section)
    given = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"{name}: unknown key; known are {', '.join(hints)}")
        try:
            given[name] = typed(value, hints[name])
        except (TypeError, ValueError):
            hint = str(hints[name]) if get_args(hints[name]) else hints[name].__name__
            raise UserError(f"{name} = {value!r}: must be of type {hint}") from None
    return section(**given)


def typed(value: Any, hint: Any) -> Any:
    """Convert a TOML or JSON value to a field's type; 0 and "" become None if the field may be None. TypeError or
    ValueError if it does not fit."""
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
