"""Make the checkout at /repo importable as ``everstep`` and its commands callable, without a build or a copy.

setup.cfg says which folder is which package (``everstep.launcher = launcher``) and which commands there
are. This does what an editable install would do, except that it writes nothing into the checkout, which is
mounted read-only.
"""

import configparser
import shutil
from pathlib import Path

REPO = Path("/repo")
ON_PYTHON_PATH = Path("/opt/src")  # a .pth file in the image points here
BIN = Path("/opt/everstep/bin")
COMMAND = """\
#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


def pairs(lines: str) -> list[tuple[str, str]]:
    """The ``name = value`` lines of one setup.cfg entry."""
    split = [line.partition("=") for line in lines.splitlines() if "=" in line]
    return [(name.strip(), value.strip()) for name, _, value in split]


def main() -> None:
    config = configparser.ConfigParser()
    config.read(REPO / "setup.cfg", encoding="utf-8")
    shutil.rmtree(ON_PYTHON_PATH)

    for package, folder in pairs(config["options"]["package_dir"]):
        link = ON_PYTHON_PATH.joinpath(*package.split("."))
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(REPO / folder)

    # importlib.metadata, and so a check that all nodes run one version, reads it here.
    name, version = config["metadata"]["name"], config["metadata"]["version"]
    info = ON_PYTHON_PATH / f"{name}-{version}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    scripts = config["options.entry_points"]["console_scripts"]
    info.joinpath("entry_points.txt").write_text(f"[console_scripts]\n{scripts.strip()}\n")

    for command, target in pairs(scripts):
        module, _, function = target.partition(":")
        script = BIN / command
        script.write_text(COMMAND.format(python=BIN / "python", module=module, function=function))
        script.chmod(0o755)


if __name__ == "__main__":
    main()
