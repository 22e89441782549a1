"""A reader of pickles that hold plain containers, and of nothing else.

Python's own unpickler builds whatever a file asks for. This one knows numbers, text, lists, tuples
and dicts with plain keys; any other instruction ends it. It calls nothing, it recurses nowhere,
and no length that a file claims is believed beyond the file's own.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

# Longer than any address or count; a number without an end would only be slow.
_LONGEST_INT = 64


class NotPlain(Exception):
    """The data is cut off, is no pickle, or holds more than plain containers."""


def loads(data: bytes) -> Any:
    """The object that `data` holds, as `pickle.loads` would give it.

    Raises: NotPlain, whose text says what stands in the way.
    """
    try:
        return _read(data)
    except (IndexError, struct.error, UnicodeDecodeError, KeyError):
        raise NotPlain("it is cut off or damaged") from None
    except MemoryError:
        raise NotPlain("it doesn't fit into memory") from None


def _read(data: bytes) -> Any:
    if data[:1] != b"\x80":
        raise NotPlain("it doesn't begin as a pickle does")
    size = len(data)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0
    while True:
        code = data[at]
        at += 1
        # In the order in which torch's snapshots have them.
        if code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(data[at : at + 4], "little")])
            at += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x8C:  # SHORT_BINUNICODE
            at, text = _text(data, at + 1, data[at], size)
            stack.append(text)
        elif code == 0x8A:  # LONG1
            length = data[at]
            if length > _LONGEST_INT:
                raise NotPlain(f"it holds an integer of {8 * length} bits")
            at += 1 + length
            if at > size:
                raise IndexError
            stack.append(int.from_bytes(data[at - length : at], "little", signed=True))
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x75:  # SETITEMS
            mark = marks.pop()
            _set(stack[mark - 1], stack[mark:])
            del stack[mark:]
        elif code == 0x4A:  # BININT
            stack.append(struct.unpack_from("<i", data, at)[0])
            at += 4
        elif code == 0x4D:  # BININT2
            stack.append(int.from_bytes(data[at : at + 2], "little"))
            at += 2
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code == 0x65:  # APPENDS
            mark = marks.pop()
            _extend(stack[mark - 1], stack[mark:])
            del stack[mark:]
        elif code == 0x61:  # APPEND
            value = stack.pop()
            _extend(stack[-1], [value])
        elif code == 0x73:  # SETITEM
            value = stack.pop()
            key = stack.pop()
            _set(stack[-1], [key, value])
        elif code == 0x95:  # FRAME
            at += 8
        elif code == 0x58:  # BINUNICODE
            at, text = _text(data, at + 4, int.from_bytes(data[at : at + 4], "little"), size)
            stack.append(text)
        elif code == 0x47:  # BINFLOAT
            stack.append(struct.unpack_from(">d", data, at)[0])
            at += 8
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            length = code - 0x84
            if len(stack) < length:
                raise IndexError
            stack[-length:] = [tuple(stack[-length:])]
        elif code == 0x74:  # TUPLE
            mark = marks.pop()
            stack[mark:] = [tuple(stack[mark:])]
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[int.from_bytes(data[at : at + 4], "little")] = stack[-1]
            at += 4
        elif code == 0x8D:  # BINUNICODE8
            at, text = _text(data, at + 8, int.from_bytes(data[at : at + 8], "little"), size)
            stack.append(text)
        elif code == 0x80:  # PROTO
            if data[at] > pickle.HIGHEST_PROTOCOL:
                raise NotPlain(f"it claims protocol {data[at]} of pickle")
            at += 1
        elif code == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise IndexError
            return stack[0]
        else:
            raise NotPlain(f"it asks for more than plain containers (opcode {_name(code)})")


_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_KEYS = frozenset((str, int, float, bool, type(None)))


def _text(data: bytes, at: int, length: int, size: int) -> tuple[int, str]:
    end = at + length
    if end > size:
        raise IndexError
    return end, data[at:end].decode("utf-8", "surrogatepass")


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) is not list:
        raise IndexError
    target.extend(values)


def _set(target: Any, pairs: list[Any]) -> None:
    if type(target) is not dict or len(pairs) % 2:
        raise IndexError
    for index in range(0, len(pairs), 2):
        key = pairs[index]
        if type(key) not in _KEYS:
            raise NotPlain(f"it has a {type(key).__name__} for a key")
        target[key] = pairs[index + 1]


def _name(code: int) -> str:
    names = {value[0]: name for name, value in vars(pickle).items() if _is_opcode(name, value)}
    return names.get(code, f"{code:#04x}")


def _is_opcode(name: str, value: Any) -> bool:
    return name.isupper() and isinstance(value, bytes) and len(value) == 1
