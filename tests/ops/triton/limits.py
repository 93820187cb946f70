"""What the kernels may need and move, and the sizes that it is known for."""

SHAPES = ("4x48", "6x64", "8x48", "12x64", "16x64", "20x64", "24x64")
DTYPES = ("bfloat16", "float32")
# Launches of each call, and the bytes it moves in units of w: what its passes over w, dy and y come to, and the bound.
TRAFFIC = {
    "tssa forward": (5, 4, 4.3),
    "tssa backward": (5, 7, 7.7),
    "short tssa forward": (1, 4, 4.3),
    "causal forward": (5, 4, 4.5),
    "causal backward": (7, 8, 9.5),
}


def check_resources(found, target):
    """Fail on a compiled kernel that a program of 8 warps would be slow with."""
    assert found["registers"] <= 192, found
    assert found["stack"] <= (0 if target == "gfx942" else 16), found
    # As much as one program may have on all targets.
    assert found["shared"] <= 48 * 1024, found


def check_traffic(name, launches, moved):
    """Fail on more launches of a call, or more bytes in units of w."""
    expected, least, most = TRAFFIC[name]
    assert launches == expected, name
    assert least <= moved <= most, (name, moved)
