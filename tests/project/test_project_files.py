"""Files for other programs say the same as the project's own: pre-commit, citation, conda."""

import configparser
import re

import pytest

import launchers
import mpiddp


def read(name: str) -> str:
    return (launchers.ROOT / name).read_text(encoding="utf-8")


def list_checks() -> dict[str, str]:
    """What tests/run.sh checks, by name, as a command."""
    text = read("tests/run.sh").replace("\\\n", " ")
    [code] = re.findall(r"^code=\((.*)\)$", text, re.MULTILINE)
    values = {'"$PYTHON"': "python", '"${code[@]}"': code}
    for array, function in (("scripts", "shell_scripts"), ("programs", "python_programs")):
        [search] = re.findall(rf"^{function}\(\) {{ (.*?)(?: \| sort)?; }}$", text, re.MULTILINE)
        values[f'"${{{array}[@]}}"'] = f"$({search})"
    for name, value in values.items():
        text = text.replace(name, value)
    found = re.findall(r'^\s*check (?:"([^"]+)"|(\w+)) (.*)$', text, re.MULTILINE)
    return {long or short: " ".join(command.split()) for long, short, command in found}


def list_hooks() -> dict[str, str]:
    text = read(".pre-commit-config.yaml")
    hook = r"name: ([^\n]*)\n +entry: (?:>-\s+)?(.*?)\n +language: system"
    found = re.findall(hook, text, re.DOTALL)
    hooks = {}
    for name, entry in found:
        words = " ".join(entry.split())
        inside = re.fullmatch(r"bash -c '(.*)'", words)
        hooks[name] = inside[1].replace('"', "'") if inside else words
    return hooks


def test_hooks_run_the_linters_of_the_test_run():
    assert len(list_checks()) == 5
    assert list_hooks() == list_checks()


def test_the_public_checks_are_the_local_ones_on_every_python_that_is_named():
    workflow = read(".github/workflows/checks.yml")
    assert "bash .ci/run" in workflow
    [pythons] = re.findall(r'python: \[(.*"3.12".*)\]', workflow)
    named = re.findall(r"Python :: (3\.\d+)$", read("setup.cfg"), re.MULTILINE)
    assert re.findall(r'"([\d.]+)"', pythons) == named


def test_the_citation_is_of_this_version():
    fields = dict(re.findall(r"^([\w-]+): (.+)$", read("CITATION.cff"), re.MULTILINE))
    assert fields["cff-version"] == "1.2.0"
    assert fields["version"] == mpiddp.__version__
    assert f"license_expression = {fields['license']}" in read("setup.cfg")
    assert "  - name: mpiddp contributors" in read("CITATION.cff")
    assert {"message", "title"} <= fields.keys()


def test_the_conda_recipe_is_valid_and_asks_for_what_a_wheel_asks_for():
    """rattler-build refuses unknown fields, licences and versions that are none."""
    rattler_build = pytest.importorskip("rattler_build")
    recipe = rattler_build.Stage0Recipe.from_file(str(launchers.ROOT / "recipe" / "recipe.yaml"))
    [output] = recipe.render(rattler_build.VariantConfig())
    found = output.recipe.to_dict()
    setup = configparser.ConfigParser()
    setup.read(launchers.ROOT / "setup.cfg", encoding="utf-8")
    options, others = setup["options"], {"torch": "pytorch", "xxhash": "python-xxhash"}
    parts = [
        re.split("(?=[<>=])", line, maxsplit=1) for line in options["install_requires"].split()
    ]
    wanted = [" ".join([others.get(name, name), *version]) for name, *version in parts]
    assert found["package"]["version"] == mpiddp.__version__
    assert found["about"]["license"] == setup["metadata"]["license_expression"]
    python, *needed = found["requirements"]["run"]
    assert python == f"python {options['python_requires']}"
    assert sorted(needed) == sorted(wanted)
    [script] = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    assert found["build"]["python"]["entry_points"] == [script]
