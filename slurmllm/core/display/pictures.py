"""matplotlib, with this package's plot style.

Modules that draw import matplotlib's names from here only (`as` marks them for export). At its
import matplotlib reads a `matplotlibrc` in the working directory: one that other users may have
written is refused.
"""

from __future__ import annotations

import io
from pathlib import Path

from slurmllm.core.errors import UserError
from slurmllm.core.run.rundir import storage_errors, write_bytes
from slurmllm.core.run.safe_files import open_trusted

_SETTINGS = Path("matplotlibrc")
if _SETTINGS.exists():
    fix = "matplotlib would read it: remove it, work in another directory, or draw no picture"
    with storage_errors(str(_SETTINGS.absolute()), fix, UserError):
        open_trusted(_SETTINGS).close()

# ruff: noqa: E402
from matplotlib import rc_context as rc_context
from matplotlib.axes import Axes as Axes
from matplotlib.figure import Figure as Figure
from matplotlib.figure import SubFigure as SubFigure
from matplotlib.lines import Line2D as Line2D
from matplotlib.ticker import EngFormatter as EngFormatter
from matplotlib.ticker import FuncFormatter as FuncFormatter
from matplotlib.ticker import LogFormatter as LogFormatter
from matplotlib.ticker import LogLocator as LogLocator
from matplotlib.ticker import MaxNLocator as MaxNLocator
from matplotlib.ticker import NullFormatter as NullFormatter
from matplotlib.ticker import NullLocator as NullLocator
from matplotlib.ticker import StrMethodFormatter as StrMethodFormatter

PICTURE_STYLE = Path(__file__).with_name("picture.mplstyle")


def write_picture(picture: Figure, path: Path, fix: str) -> None:
    """Write a PNG atomically; `fix` is what to do if it cannot be written.

    Raises:
        StorageError: the file system refused.
    """
    stream = io.BytesIO()
    picture.savefig(stream, format="png", pil_kwargs={"compress_level": 3})
    write_bytes(path, stream.getvalue(), f"cannot write the picture {path}", fix)
