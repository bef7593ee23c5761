"""A site's file, its checks and its profiles: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
from everstep.healthcheck import cli, plugins, registry, site, trust
from everstep.healthcheck.errors import HealthError
from everstep.healthcheck.facts import Facts
from everstep.healthcheck.policy import Mode
from everstep.healthcheck.profile import Profile
from everstep.healthcheck.registry import Check, Level
from everstep.healthcheck.result import Result, Status, ok
from everstep.healthcheck.runner import System
from everstep.healthcheck.trust import Untrusted

NOT_ROOT = 1000


def seen_as(others: Mapping[str, tuple[int, int]]) -> Callable[[str], os.stat_result]:
    """lstat of a machine where root owns everything and others write nothing, but for {path: (uid, mode)}."""

    def lstat(path: str) -> os.stat_result:
        real = os.lstat(path)
        uid, mode = others.get(path, (0, 0o755))
        return os.stat_result((stat.S_IFMT(real.st_mode) | mode, *real[1:4], uid, *real[5:]))

    return lstat


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    real = tmp_path.resolve() / "etc" / "everstep"
    real.mkdir(parents=True)
    (real / "health.toml").write_text('mode = "drain"\n')
    (real / "link.toml").symlink_to("health.toml")
    (real.parent / "loop").symlink_to("loop")
    (real.parent / "other").symlink_to(real)
    return real


# --- whose files are followed ---


def test_root_follows_what_root_alone_can_write(tree: Path) -> None:
    assert trust.resolve(tree / "health.toml", uid=0, lstat=seen_as({})) == tree / "health.toml"


def test_links_are_followed_to_where_they_lead(tree: Path) -> None:
    found = trust.resolve(tree.parent / "other" / ".." / "everstep" / "link.toml", uid=0, lstat=seen_as({}))
    assert found == tree / "health.toml"
    assert (
        trust.resolve(tree.parent / "other" / "link.toml", uid=0, lstat=seen_as({})) == tree / "health.toml"
    )


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
def test_root_follows_nothing_below_a_folder_that_others_can_write(tree: Path, mode: int) -> None:
    for folder in (tree, tree.parent, tree.parent.parent):
        with pytest.raises(Untrusted, match=f"others can write {folder}; `chmod go-w {folder}`"):
            trust.resolve(tree / "health.toml", uid=0, lstat=seen_as({str(folder): (0, mode)}))


def test_root_follows_nothing_below_a_folder_of_somebody_else(tree: Path) -> None:
    with pytest.raises(Untrusted, match=f"{tree.parent} belongs to user {NOT_ROOT}"):
        trust.resolve(tree / "health.toml", uid=0, lstat=seen_as({str(tree.parent): (NOT_ROOT, 0o755)}))


@pytest.mark.parametrize("about", [(NOT_ROOT, 0o644), (0, 0o664), (0, 0o646)])
def test_root_follows_no_file_that_others_own_or_write(tree: Path, about: tuple[int, int]) -> None:
    with pytest.raises(Untrusted):
        trust.resolve(tree / "health.toml", uid=0, lstat=seen_as({str(tree / "health.toml"): about}))


def test_root_follows_no_link_of_somebody_else_and_no_link_into_their_folder(tree: Path) -> None:
    with pytest.raises(Untrusted, match=r"link.toml belongs"):
        trust.resolve(tree / "link.toml", uid=0, lstat=seen_as({str(tree / "link.toml"): (NOT_ROOT, 0o777)}))
    elsewhere = tree.parent.parent / "home"
    elsewhere.mkdir()
    (elsewhere / "x.toml").write_text("")
    (tree / "away.toml").symlink_to(elsewhere / "x.toml")
    with pytest.raises(Untrusted, match=r"away.toml is not followed: .*home belongs to user"):
        trust.resolve(tree / "away.toml", uid=0, lstat=seen_as({str(elsewhere): (NOT_ROOT, 0o755)}))


def test_links_in_a_circle_end(tree: Path) -> None:
    with pytest.raises(Untrusted, match="too many symbolic links"):
        trust.resolve(tree.parent / "loop", uid=0, lstat=seen_as({}))


def test_other_users_follow_what_they_can_read(tree: Path) -> None:
    (tree / "health.toml").chmod(0o666)
    assert trust.read(tree / "health.toml", uid=NOT_ROOT) == b'mode = "drain"\n'


def test_a_pipe_in_the_place_of_a_file_does_not_hang(tree: Path) -> None:
    os.mkfifo(tree / "pipe")
    with pytest.raises(Untrusted, match="no plain file"):
        trust.read(tree / "pipe", uid=NOT_ROOT)


def test_a_file_is_replaced_whole_and_its_folder_made(tree: Path) -> None:
    path = tree / "lib" / "state" / "last.json"
    for text in (b"one", b"two"):
        trust.write(path, text, mode=0o600, uid=NOT_ROOT)
        assert path.read_bytes() == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["last.json"]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tree: Path) -> None:
    victim = tree / "victim"
    victim.write_text("mine")
    (tree / "last.json").symlink_to(victim)
    trust.write(tree / "last.json", b"new", uid=NOT_ROOT)
    assert victim.read_text() == "mine"
    assert (tree / "last.json").read_text() == "new"


# --- the file ---


def test_without_a_file_nothing_acts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(site.VARIABLE, raising=False)
    monkeypatch.setattr(site, "DEFAULT", str(tmp_path / "none.toml"))
    loaded = site.load()
    assert loaded.site.settings().mode is Mode.REPORT
    assert "built-in" in loaded.source


def test_a_whole_file_is_read() -> None:
    text = b"""
        mode = "drain"
        profile = "p5"
        plugins = ["/etc/everstep/checks"]
        shared_dir = "/shared/health"
        [policy]
        confirm = 2
        flap_hours = 12
        contract = true
        [program]
        limit_s = 30
        [checks.clocks]
        act = "off"
        [checks.temperature]
        act = "report"
    """
    read = site.parse(text, "x")
    assert read.off() == {"clocks"}
    assert read.program.limit_s == 30
    assert read.program.level == "full"
    settings = read.settings(frozenset({"xid"}))
    assert (settings.mode, settings.confirm, settings.flap_window_s) == (Mode.DRAIN, 2, 12 * 3600)
    assert settings.contract
    assert settings.report_only == {"clocks", "temperature"}
    assert settings.after_boot == {"xid"}


def test_a_site_may_name_the_checks_that_need_a_boot() -> None:
    read = site.parse(b"[policy]\nafter_boot = []\n", "x")
    assert read.settings(frozenset({"xid"})).after_boot == frozenset()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"mode = \n", "health.toml is not TOML: .*line 1"),
        (b"mood = 'drain'\n", "no such setting: `mood`"),
        (b"[policy]\nflap = 3\n", "no such setting: `flap`.*`policy`"),
        (b"mode = 'kill'\n", "Invalid enum value 'kill'.*`mode`"),
        (b"[policy]\nconfirm = 0\n", ">= 1.*`policy.confirm`"),
        (b"[prolog]\nlimit_s = 90\n", "<= 45.*`prolog.limit_s`"),
        (b"[program]\nlevel = 'deep'\n", "Invalid enum value 'deep'"),
        (b"[checks.xid]\nact = false\n", "`checks"),
        (b"plugins = 'x'\n", "Expected `array`"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_is_not_right_is_one_line_that_says_where(text: bytes, said: str) -> None:
    with pytest.raises(HealthError, match=said) as error:
        site.parse(text, "/etc/everstep/health.toml")
    assert "\n" not in str(error.value)
    assert "health.toml" in str(error.value)
    assert error.value.exit_code == 3


def test_a_named_file_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(HealthError, match=r"no file .*none.toml"):
        site.load(tmp_path / "none.toml")


DOCS = (Path(__file__).parents[3] / "docs" / "health.md").read_text()


def in_docs(language: str) -> str:
    """The one block of code in that language."""
    (block,) = re.findall(rf"^```{language}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    return str(block)


def test_the_file_in_the_documentation_is_right_and_says_what_holds_without_it() -> None:
    text = in_docs("toml")
    shown = site.parse(text.encode(), "docs")
    assert msgspec.structs.replace(shown, checks={}, profile=None) == site.Site()
    named = set(re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE))
    for struct in (site.Site, site.Policy, site.Program, site.Hook, site.Switch):
        fields = {each.name for each in msgspec.structs.fields(struct)}
        assert fields <= named | {"policy", "program", "prolog", "epilog", "checks"}


# --- a site's own checks ---

CHECK = '''
from everstep.healthcheck.registry import Level, check
from everstep.healthcheck.result import critical, ok, Severity

@check("{name}", Level.LIGHT, source="a file", action="mend it")
def run(facts, profile):
    """The license file is there."""
    if facts.runner.read("/etc/license") is None:
        return critical("no license", Severity.MONITOR, "/etc/license")
    return ok("there")
'''


@pytest.fixture
def register() -> Iterator[dict[str, Check]]:
    """Our checks, in a register that the test may change."""
    registry.load(sites=False)
    before = dict(registry.REGISTER)
    yield registry.REGISTER
    registry.REGISTER.clear()
    registry.REGISTER.update(before)


def test_a_site_adds_a_check_in_one_file(tmp_path: Path, register: dict[str, Check]) -> None:
    (tmp_path / "license.py").write_text(CHECK.format(name="license_one"))
    (tmp_path / "_not.py").write_text("raise SystemExit")
    faults = plugins.load(site.Site(plugins=(str(tmp_path),)), uid=NOT_ROOT)
    assert faults == ()
    found = register["license_one"].run(Facts(System(tmp_path)), Profile("x"))
    assert isinstance(found, Result)
    assert (found.status, found.device) == (Status.CRITICAL, "/etc/license")


def test_the_check_in_the_documentation_works(tmp_path: Path, register: dict[str, Check]) -> None:
    (tmp_path / "license_in_docs.py").write_text(in_docs("python"))
    assert plugins.load(site.Site(plugins=(str(tmp_path / "license_in_docs.py"),)), uid=NOT_ROOT) == ()
    root = tmp_path / "root"
    root.mkdir()

    def status() -> Status:
        found = register["license"].run(Facts(System(root)), Profile("x"))
        assert isinstance(found, Result)
        return found.status

    assert status() is Status.SKIP
    for folder in ("etc/license", "usr/bin"):
        (root / folder).mkdir(parents=True)
    (root / "etc/license/servers").write_text("license1\n")
    assert status() is Status.CRITICAL
    (root / "usr/bin/lmstat").write_text("#!/bin/sh\nexit 0\n")
    (root / "usr/bin/lmstat").chmod(0o755)
    assert status() is Status.OK


def test_a_site_s_check_is_tried_on_a_recorded_node(
    tmp_path: Path,
    register: dict[str, Check],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOT_ROOT)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "license_by_hand.py").write_text(CHECK.format(name="license_three"))
    (tmp_path / "health.toml").write_text(f"plugins = ['{tmp_path}/license_by_hand.py']\n")
    (tmp_path / "root").mkdir()
    words = ["check", "--config", f"{tmp_path}/health.toml", "--root", f"{tmp_path}/root"]
    assert cli.main([*words, "--check", "license_three", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["results"][0]["device"] == "/etc/license"


def test_a_file_of_ours_that_is_not_utf_8_is_one_line_and_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: NOT_ROOT)
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b'mode = "dr\xe4in"\n')
    good = tmp_path / "health.toml"
    good.write_text(f"profiles = ['{bad}']\n")
    for config, said in ((bad, "is not UTF-8 text: byte 10"), (good, f"the profile {bad} cannot be read")):
        for words in (["check", "--config", str(config)], ["--config", str(config)]):
            if config == good and "check" not in words:
                continue  # the report reads no profiles
            monkeypatch.setattr("everstep.healthcheck.ask.slurm_is_here", lambda: None)
            with pytest.raises(HealthError, match=said) as error:
                cli.main(words)
            assert error.value.exit_code == 3 and "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["import nothing_like_it\n", "def broken(:\n", "raise ValueError('no')\n"])
def test_a_broken_file_of_checks_stops_no_other(
    tmp_path: Path, register: dict[str, Check], text: str
) -> None:
    (tmp_path / f"a{abs(hash(text))}.py").write_text(text)
    (tmp_path / "z_two.py").write_text(CHECK.format(name="license_two"))
    faults = plugins.load(site.Site(plugins=(str(tmp_path),)), uid=NOT_ROOT)
    assert len(faults) == 1
    assert "cannot be loaded" in faults[0]
    assert "license_two" in register


def test_a_switch_for_a_check_that_there_is_not_is_said(register: dict[str, Check]) -> None:
    faults = plugins.load(site.parse(b"[checks.gpu_xdi]\nact = 'off'\n", "x"), uid=NOT_ROOT)
    assert faults == ("[checks.gpu_xdi] is about no check; `everstep health checks` lists them",)


def test_a_check_of_a_site_that_hangs_is_given_up_and_named() -> None:
    def hangs(facts: Facts, profile: Profile) -> Result:
        time.sleep(5)
        return ok("late")

    slow = plugins.limited(Check("slow", Level.LIGHT, hangs, "", "", "site"), seconds=0.05)
    found = slow.run(Facts(System("/")), Profile("x"))
    assert isinstance(found, Result)
    assert found.status is Status.WARN
    assert "did not end in 0.05 s" in found.reason


def test_a_check_of_a_site_that_raises_raises_here() -> None:
    def breaks(facts: Facts, profile: Profile) -> Result:
        raise KeyError("x")

    with pytest.raises(KeyError):
        plugins.limited(Check("b", Level.LIGHT, breaks, "", "", "site")).run(Facts(System("/")), Profile("x"))


def test_a_folder_of_checks_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(HealthError, match="no file or folder"):
        plugins.load(site.Site(plugins=(str(tmp_path / "none"),)), uid=NOT_ROOT)


def test_a_site_s_profiles_are_found_by_their_files_names(tmp_path: Path) -> None:
    (tmp_path / "box.toml").write_text('title = "ours"\n')
    found = plugins.profiles(site.Site(profiles=(str(tmp_path),)), uid=NOT_ROOT)
    assert found["box"] == 'title = "ours"\n'
