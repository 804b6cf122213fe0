"""Change the content of a file so that it stays nearly valid: by bytes and by structure."""

import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

Mutate = Callable[[random.Random, bytes], bytes]

INTEGERS = (0, 1, -1, 2, 7, 127, 128, 255, 65_535, 2**24 + 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63)
VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "../x", "/etc/passwd", "os:system", "\x1b[2J", "=1+1", "é" * 300),
    *INTEGERS,
    *(0.5, -1e-300, 1e308, 1e400, float("nan"), -(2**70), 10**400),
    *([], {}, [[]], [None], {"a": 1}, [0] * 1000, {"step": 0}, {"tensor": "x"}, {"tuple": [1]}),
)
TEXTS = (
    *(
        b"",
        b"0",
        b"-1",
        b"1e400",
        b"nan",
        b"inf",
        b"1_0",
        b"9" * 400,
        b"2e19",
        b"0x10",
        b'"',
        b"''",
    ),
    *(
        b"\n",
        b"\r",
        b"\x00",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\xed\xa0\x80",
        b",",
        b";",
        b"\t",
        b"[",
    ),
    *(b"y", b"t", b"time", b"set", b"series", b"trajectory", b"label", b"[[fit]]", b"a.b = 1"),
    *(b"true", b"[" * 300, b"{a=" * 300, b'"os:system"', b"../../x", b"=cmd|' /C calc'!A0"),
)
MAX_CHANGES = 3


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flip, overwrite, cut, repeat or insert bytes in a few places."""
    out = bytearray(data)
    for _ in range(rng.randint(1, MAX_CHANGES)):
        at = rng.randrange(len(out) + 1)
        length = min(int(2 ** rng.uniform(0, 10)), len(out) - at)
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.randrange(256)
            case 2:
                size = rng.choice((1, 2, 4, 8))
                number = rng.choice(INTEGERS) % 256**size
                out[at : at + size] = number.to_bytes(size, rng.choice(("little", "big")))
            case 3:
                del out[at : at + length]
            case 4:
                out[at:at] = out[at : at + length] * rng.choice((1, 1, 2, 30))
            case 5:
                out[at:at] = rng.choice(TEXTS)
            case 6:
                del out[at:]
    return bytes(out)


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Replace, repeat or remove lines and fields of a text."""
    lines = data.split(b"\n")
    for _ in range(rng.randint(1, MAX_CHANGES)):
        at = rng.randrange(len(lines))
        match rng.randrange(5):
            case 0:
                lines[at:at] = [lines[rng.randrange(len(lines))]] * rng.choice((1, 1, 50))
            case 1 if len(lines) > 1:
                del lines[at]
            case 2:
                fields = lines[at].split(b",")
                fields[rng.randrange(len(fields))] = rng.choice(TEXTS)
                lines[at] = b",".join(fields)
            case 3:
                key, equals, _ = lines[at].partition(b"=")
                lines[at] = key + equals + b" " + rng.choice(TEXTS)
            case _:
                lines[at] = mutate_bytes(rng, lines[at])
    return b"\n".join(lines)


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Return a JSON value with a few of its parts replaced, repeated, removed or nested."""
    for _ in range(rng.randint(1, MAX_CHANGES)):
        places = _places(tree)
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1:
                donor, other = rng.choice(places)
                holder[key] = donor[other] if other in _keys(donor) else None
            case 2:
                for _ in range(rng.choice((1, 2, 200))):
                    holder[key] = rng.choice(([holder[key]], {"a": holder[key]}))
            case 3 if isinstance(holder, list):
                holder[key:key] = [holder[key]] * rng.choice((1, 1, 30, 30, 30, 1000))
            case 4 if isinstance(holder, dict):
                holder[rng.choice(("", "x", "..", "__class__", str(key) + "s"))] = holder.pop(key)
            case _:
                holder[key] = rng.choice(VALUES)
        tree = json.loads(_dumps(tree))  # no part is shared
    return tree


def _places(tree: Any) -> list[tuple[Any, Any]]:
    found, stack = [], [tree]
    while stack:
        part = stack.pop()
        keys = _keys(part)
        found += [(part, key) for key in keys]
        stack += [part[key] for key in keys]
    return found


def _keys(part: Any) -> list[Any]:
    if isinstance(part, dict):
        return list(part)
    return list(range(len(part))) if isinstance(part, list) else []


def _dumps(tree: Any) -> str:
    try:
        return json.dumps(tree)
    except (ValueError, RecursionError):
        return "[]"


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Change the tree of a JSON file, or sometimes its bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(rng, data)
    if rng.random() < 0.02:
        return rng.choice((b"[", b'{"a":')) * 100_000
    return _dumps(mutate_tree(rng, json.loads(data))).encode()


def mutate_npy(rng: random.Random, data: bytes) -> bytes:
    """Change shape, type or order in the header of an .npy file, or its bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    version = rng.choice(((1, 0), (1, 0), (2, 0), (3, 0), (9, 9)))
    shape = tuple(rng.choice((*INTEGERS, 40, 40, 3)) for _ in range(rng.randrange(5)))
    kinds = ("<f8", ">f8", "<f4", "<f2", "<i8", "<u8", "<c16", "|O", "<U5", "|S3", "<M8[s]", "|b1")
    fields = {
        "descr": rng.choice((*kinds, "<f16", "<U0", "<U99999", "|V8", [("a", "<f8")], "bad", 3)),
        "fortran_order": rng.choice((False, True, 2)),
        "shape": rng.choice((shape, (40, 3), (40,), list(shape), 5, ((),) * 3, "(" * 200)),
    }
    text = str(fields).encode()
    if rng.random() < 0.1:
        text = rng.choice((b"__import__('os')", b"{" * 500, b"(" * 9000, mutate_bytes(rng, text)))
    text += b"\n"
    size = struct.pack("<H" if version == (1, 0) else "<I", min(len(text), 65_535))
    start = data.index(b"\n") + 1
    return b"\x93NUMPY" + bytes(version) + size + text + data[start:]


def mutate_npz(rng: random.Random, data: bytes) -> bytes:
    """Change a member of an archive, its name or its compression, or the bytes of the archive."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    at = rng.randrange(len(members))
    name, content = members[at]
    match rng.randrange(5):
        case 0:
            members.append((rng.choice(members)[0], content))
        case 1:
            members[at] = (rng.choice(("x.npy", "t.npy", "kind.npy", "names.npy", "../x")), content)
        case 2:
            del members[at]
        case _:
            members[at] = (name, mutate_npy(rng, content))
    buffer = io.BytesIO()
    method = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    out = buffer.getvalue()
    return mutate_bytes(rng, out) if rng.random() < 0.2 else out


def mutate_pt(rng: random.Random, data: bytes) -> bytes:
    """Change the pickle or the tensors of a `.pt` file, or its bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([name for name in members if name.endswith("data.pkl")] * 3 + [*members])
    old, new = rng.choice(
        (
            (b"torch._utils\n_rebuild_tensor_v2", b"os\nsystem"),
            (b"collections\nOrderedDict", b"builtins\neval"),
            (b"DoubleStorage", rng.choice((b"ByteStorage", b"ComplexDoubleStorage", b"Evil"))),
            (b"cpu", rng.choice((b"cuda:0", b"meta", b"disk"))),
            (b"K(", b"M" + rng.randrange(65_536).to_bytes(2, "little")),
            (b"", b""),
        )
    )
    changed = members[name].replace(old, new, 1) if old else mutate_bytes(rng, members[name])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for other, content in {**members, name: changed}.items():
            archive.writestr(zipfile.ZipInfo(other), content)
    return buffer.getvalue()


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Change the header of a safetensors file, or its bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(rng, data)
    end = 8 + int.from_bytes(data[:8], "little")
    header = mutate_json(rng, data[8:end])
    return len(header).to_bytes(8, "little") + header + data[end:]


def mutate_png(rng: random.Random, data: bytes) -> bytes:
    """Change the chunks of a PNG and correct their sums, or change the bytes of any image."""
    if rng.random() < 0.5 or not data.startswith(b"\x89PNG"):
        return mutate_bytes(rng, data)
    chunks, at = [], 8
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        chunks.append((data[at + 4 : at + 8], data[at + 8 : at + 8 + size]))
        at += 12 + size
    at = rng.randrange(len(chunks))
    name, content = chunks[at]
    chunks[at] = (
        rng.choice((name, b"zTXt", b"iTXt", b"IDAT", b"acTL")),
        mutate_bytes(rng, content),
    )
    parts = [
        struct.pack(">I", len(body)) + tag + body + struct.pack(">I", zlib.crc32(tag + body))
        for tag, body in chunks
    ]
    return data[:8] + b"".join(parts)
