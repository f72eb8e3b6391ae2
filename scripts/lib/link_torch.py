"""Hard links of this environment's torch into another one: python link_torch.py OTHER_PYTHON torch==VERSION

Four environments with the same torch need one copy on disk and no unpacking. Does nothing, and says so, when the
versions of torch or Python differ or the file system has no hard links; pip then installs as always.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def main(other: str, wanted: str) -> int:
    """0 whether or not anything was linked; only a half-made link is an error (1)."""
    asked = "import sys, sysconfig; print(sys.version, sysconfig.get_path('purelib'), sep='\\n\\0')"
    version, _, place = subprocess.run([other, "-c", asked], capture_output=True, text=True).stdout.partition("\n\0")
    try:
        torch = distribution("torch")
    except PackageNotFoundError:
        torch = None
    if torch is None or torch.version.split("+")[0] != wanted.removeprefix("torch==") or version != sys.version:
        print(f"install: no {wanted} for this Python to link; pip installs it")
        return 0
    folder, source = Path(place.strip()), Path(torch.locate_file(""))
    linked = 0
    try:
        for file in torch.files or []:
            if ".." in file.parts or "__pycache__" in file.parts:
                continue  # scripts in bin/ belong to one environment
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.link(source / file, folder / file)
            linked += 1
    except OSError as error:
        if linked:
            print(f"install: linking torch stopped at {file}: {error.strerror}", file=sys.stderr)
            return 1
        print(f"install: {error.strerror}; pip installs {wanted}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
