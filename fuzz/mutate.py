"""Changes to an input that get past its outer layers.

A flipped bit in an archive is caught by its checksum, and nothing behind that is ever tested. So formats that are known
here are opened, changed inside, and closed again with the right lengths and checksums. What comes out depends only on
the random numbers, so that a run without a coverage-guided fuzzer can be repeated.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

_MOST_UNPACKED = 1 << 20

_NUMBERS = (b"0", b"-1", b"1", b"255", b"65536", b"2147483648", b"-9223372036854775809", b"1e309", b"nan", b"0.5")
_BYTES = (
    b"\0",
    b"\xff",
    b"\x80",
    b"\n",
    b"\t",
    b" ",
    b"'",
    b'"',
    b"\\",
    b"\xed\xa0\x80",
    "\u202e".encode(),
    b"[" * 3000,
)
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 0.5, 1e308, float("nan"), float("inf")),
    *("", "0", "a" * 300, "../../x", "/", "\ud800", "\0", "nan", [], {}, [[]], [0] * 50, {"": {}}, ["a", 1, None]),
)


def mutate(data: bytes, chance: Random, words: Sequence[bytes] = ()) -> bytes:
    """Return a changed copy of an input.

    Args:
        data: The input.
        chance: Source of all decisions.
        words: Pieces that mean something to the parser, to be put in now and then.
    """
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        change = _change_bytes
        if chance.random() < 0.8:
            change = next((inside for begins, inside in _FORMATS if begins(data)), _change_text)
        try:
            data = change(data, chance, words)
        except (ValueError, RuntimeError, OSError, EOFError, zlib.error, struct.error, zipfile.BadZipFile):
            data = _change_bytes(data, chance, words)  # no longer what its first bytes promise
    return data


def _change_bytes(data: bytes, chance: Random, words: Sequence[bytes]) -> bytes:
    start = chance.randrange(len(data) + 1)
    stop = min(len(data), start + chance.choice((0, 1, 1, 2, 4, 8, 64)))
    match chance.randrange(7):
        case 0 if start < len(data):
            put = bytes([data[start] ^ 1 << chance.randrange(8)]) + data[start + 1 : stop]
        case 1:
            put = chance.randbytes(stop - start)
        case 2:
            put = b""
        case 3:
            put = 2 * data[start:stop]
        case 4:
            put = chance.choice((*_BYTES, *_NUMBERS, *words))
        case 5:
            number = chance.choice((0, 1, 0x7F, 0xFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1))
            put = number.to_bytes(4, chance.choice(("big", "little")))
        case _:
            return data[:start] if chance.random() < 0.5 else data + data[start:stop]
    return data[:start] + put + data[stop:]


def _change_text(data: bytes, chance: Random, words: Sequence[bytes]) -> bytes:
    """Change a line, its order, or the value after a sign such as a colon."""
    lines = data.split(b"\n")
    place = chance.randrange(len(lines))
    match chance.randrange(6):
        case 0:
            lines.insert(chance.randrange(len(lines) + 1), lines[place])
        case 1:
            del lines[place]
        case 2:
            lines[place] = chance.choice((b"  ", b"\t", b"- ")) + lines[place]
        case 3:
            sign = chance.choice((b":", b"=", b"\t", b" ", b","))
            head, found, _ = lines[place].partition(sign)
            if sign in lines[place]:
                lines[place] = head + found + chance.choice((b" ", b"")) + chance.choice((*_NUMBERS, *_BYTES, *words))
        case 4 if words:
            lines[place] = chance.choice(words) + lines[place]
        case _:
            return _change_bytes(data, chance, words)
    return b"\n".join(lines)


def _change_json(data: bytes, chance: Random, words: Sequence[bytes]) -> bytes:
    if chance.random() < 0.03:
        return data.replace(b"{", chance.choice((b"[", b'{"a":')) * chance.choice((900, 100_000)) + b"{", 1)
    try:
        root = [json.loads(data)]
    except ValueError:  # one object per line
        lines = data.split(b"\n")
        place = chance.randrange(len(lines))
        lines[place] = _change_json(lines[place], chance, words) if len(lines) > 1 and lines[place] else b"{}"
        return b"\n".join(lines)
    places = _places(root)
    holder, key = chance.choice(places)
    match chance.randrange(5):
        case 0:
            holder[key] = [holder[key]]
        case 1 if holder is not root:
            del holder[key]
        case 2:
            other, theirs = chance.choice(places)
            holder[key] = json.loads(json.dumps(other[theirs]))
        case 3 if isinstance(holder, dict):
            names = [name.decode("utf-8", "replace") for name in words] or ["a"]
            holder[chance.choice(names)] = holder[key]
        case _:
            holder[key] = chance.choice(_VALUES)
    return json.dumps(root[0] if root else None).encode()


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    found, holders = [], [root]
    for holder in holders:
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            found.append((holder, key))
            if isinstance(value, dict | list):
                holders.append(value)
    return found


def _change_gzip(data: bytes, chance: Random, words: Sequence[bytes]) -> bytes:
    inside = zlib.decompressobj(31).decompress(data, _MOST_UNPACKED)
    return gzip.compress(mutate(inside, chance, words), compresslevel=1, mtime=0)


def _change_zip(data: bytes, chance: Random, words: Sequence[bytes]) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name)[:_MOST_UNPACKED] for name in archive.namelist()}
    if not members:
        return _change_bytes(data, chance, words)
    # The program of a pickle decides what the other members mean.
    likely = [name for name in members if name.endswith("data.pkl")]
    name = chance.choice(likely if likely and chance.random() < 0.7 else list(members))
    members[name] = mutate(members[name], chance, words)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for member, content in members.items():
            archive.writestr(zipfile.ZipInfo(member), content)
    return stream.getvalue()


def _change_safetensors(data: bytes, chance: Random, words: Sequence[bytes]) -> bytes:
    (size,) = struct.unpack("<Q", data[:8])
    if size > len(data):
        return _change_bytes(data, chance, words)
    header, rest = data[8 : 8 + size], data[8 + size :]
    if chance.random() < 0.8:
        header = _change_json(header, chance, words)
    else:
        rest = _change_bytes(rest, chance, words)
    return struct.pack("<Q", len(header)) + header + rest


def _change_png(data: bytes, chance: Random, words: Sequence[bytes]) -> bytes:
    chunks, at = [], 8
    while at + 12 <= len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    if not chunks:
        return _change_bytes(data, chance, words)
    place = chance.randrange(len(chunks))
    kind, content = chunks[place]
    chunks[place] = kind, _change_bytes(content, chance, words)
    packed = (struct.pack(">I", len(c)) + k + c + struct.pack(">I", zlib.crc32(k + c)) for k, c in chunks)
    return data[:8] + b"".join(packed)


_Change = Callable[[bytes, Random, Sequence[bytes]], bytes]
_FORMATS: tuple[tuple[Callable[[bytes], bool], _Change], ...] = (
    (lambda data: data.startswith(b"\x1f\x8b"), _change_gzip),
    (lambda data: data.startswith(b"PK"), _change_zip),
    (lambda data: data.startswith(b"\x89PNG"), _change_png),
    (lambda data: data[4:9] == b"\0\0\0\0{", _change_safetensors),
    (lambda data: data[:1] in (b"{", b"["), _change_json),
)
