"""matplotlib, for pictures of curves, in this package's style.

Modules that draw import matplotlib's names from here: matplotlib reads a `matplotlibrc` in the
working directory, which may be a folder that other users write to, before all other settings.
"""

from __future__ import annotations

import io
import os
import warnings
from pathlib import Path

from slurmllm.rundir import write_bytes

_here = os.open(".", os.O_PATH)  # can be left and entered again, even if it was removed
os.chdir("/")
try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import (
        EngFormatter,
        FuncFormatter,
        LogFormatter,
        LogLocator,
        MaxNLocator,
        NullFormatter,
        NullLocator,
        StrMethodFormatter,
    )  # fmt: skip
finally:
    os.fchdir(_here)
    os.close(_here)

__all__ = [
    "PICTURE_STYLE", "Axes", "EngFormatter", "Figure", "FuncFormatter", "Line2D", "LogFormatter",
    "LogLocator", "MaxNLocator", "NullFormatter", "NullLocator", "StrMethodFormatter",
    "SubFigure", "rc_context", "write_picture",
]  # fmt: skip

PICTURE_STYLE = Path(__file__).with_name("picture.mplstyle")


def write_picture(picture: Figure, path: Path, fix: str) -> None:
    """Write a PNG atomically; `fix` is what to do if it cannot be written.

    Raises:
        StorageError: the file system refused.
    """
    stream = io.BytesIO()
    with warnings.catch_warnings():
        # A run may be named in a script that matplotlib's font lacks: drawn as boxes then.
        warnings.filterwarnings("ignore", message="Glyph")
        picture.savefig(stream, format="png", pil_kwargs={"compress_level": 3})
    write_bytes(path, stream.getvalue(), f"cannot write the picture {path}", fix)
