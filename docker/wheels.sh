#!/bin/bash
# Download the wheels for the cluster's image into docker/wheels, with this machine's own pip settings: the package
# index may be one that only this machine reaches or trusts. Does nothing when they are there.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
wheels=docker/wheels

# A Python that has pip; the image's Python is 3.11 whatever this one is.
python_with_pip() {
    local candidate
    for candidate in "${PYTHON:-}" .venv/bin/python python3.11 python3; do
        if [ -n "$candidate" ] && "$candidate" -m pip --version > /dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    [ -x $wheels/.venv/bin/python ] || python3 -m venv $wheels/.venv > /dev/null || return 1
    echo $wheels/.venv/bin/python
}

mkdir -p $wheels
wanted=$(python3 docker/requirements.py setup.cfg)
if [ -e $wheels/.complete ] && [ "$(cat $wheels/.complete)" = "$wanted" ]; then
    exit 0
fi
python=$(python_with_pip) || fail "no Python with pip is here to download wheels with: apt-get install python3-venv"
say "downloading the wheels for the cluster's Python ..."
rm -f $wheels/*.whl $wheels/.complete
echo "$wanted" > $wheels/.wanted
"$python" -m pip download --quiet --quiet --dest $wheels --python-version 3.11 --only-binary=:all: \
    --requirement $wheels/.wanted ||
    fail "pip could not download them; it says why above. Its settings: $python -m pip config list"
mv $wheels/.wanted $wheels/.complete
