"""Print what the test cluster's Python needs, from setup.cfg: ``requirements.py SETUP_CFG``."""

import configparser
import sys

# A fixed torch, so that every machine that builds the cluster tests the same one.
PINNED = {"torch": "torch==2.13.0"}


def requirements(setup_cfg: str) -> list[str]:
    config = configparser.ConfigParser()
    with open(setup_cfg, encoding="utf-8") as file:
        config.read_file(file)
    lines = config["options"]["install_requires"].split("\n")
    wanted = [line.strip() for line in lines if line.strip()]
    return [PINNED.get(name.split(">")[0].split("=")[0].strip(), name) for name in wanted]


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1])))
