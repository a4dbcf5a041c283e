"""`eval compare --losses`: verdicts on CSV files are those on the runs that they are exports of."""

import csv
import json

import numpy as np
import pytest

from canon_pretrain.report import losses
from canon_pretrain.run.results import read_samples
from eval.__main__ import main as eval_main
from tests.report_runs import evaluated, plant_answers, planted_run, records
from tests.support import command_error, refused

HEADER = "item,loss,weight,seed\n"


def write(path, rows):
    """Write rows by column as CSV."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def exported(run, **columns):
    """Return the held-out losses of a run folder, a row per document; NAME=VALUE are columns."""
    (results,) = run.glob("evals/*/validation/*")
    rows = []
    for record in read_samples(results)["validation"]:
        nats, tokens = record["nats_per_token"]
        row = {"item": record["doc_hash"], "loss": repr(nats / tokens), "weight": tokens}
        if "source" in record:
            row["document"] = record["source"]
        rows.append(row | columns)
    return rows


def compare(folder, *words):
    """Run `eval compare`; return what --json writes."""
    path = folder / "compared.json"
    eval_main(["compare", *map(str, words), "--json", str(path)])
    return json.loads(path.read_text())


def only_row(content):
    """Return the one verdict; its names and unit are those of the source of the losses."""
    (row,) = content["pairs"]
    for name in ("metric", "step", "baseline_step", "bits_per_nat"):
        del row[name]
    return row


@pytest.mark.parametrize("num_seeds", [1, 2, 3])
@pytest.mark.parametrize("in_one_file", [True, False], ids=["one file", "files"])
def test_exports_have_the_verdicts_of_runs(tmp_path, num_seeds, in_one_file):
    runs = {"a": [], "b": []}
    files = {"a": [], "b": []}
    for name, canon, loss in (("a", "", 5.0), ("b", "A", 4.96)):
        for seed in range(num_seeds):
            run = evaluated(tmp_path / f"{name}{seed}", canon, loss + 0.004 * seed, seed)
            runs[name].append(run)
        rows = [exported(run, seed=seed) for seed, run in enumerate(runs[name])]
        if in_one_file:
            rows = [sum(rows, [])]
        for index, file_rows in enumerate(rows):
            files[name].append(write(tmp_path / f"{name}{index}.csv", file_rows))

    of_runs = compare(tmp_path, "--a", *runs["a"], "--b", *runs["b"])
    of_files = compare(tmp_path, "--losses", *files["b"], "--against", *files["a"])

    row = only_row(of_files)
    assert row == only_row(of_runs)
    assert row["num_runs"] == [num_seeds, num_seeds]
    assert row["verdict"] == ("not judged" if num_seeds == 1 else "better")
    assert of_files["family"] == of_runs["family"]

    # one seed with a known spread
    sigma = ("--seed-sigma", "validation=0.01")
    of_runs = compare(tmp_path, "--a", *runs["a"], "--b", *runs["b"], *sigma)
    of_files = compare(tmp_path, "--losses", *files["b"], "--against", *files["a"], *sigma)
    assert only_row(of_files) == only_row(of_runs)


def test_items_of_a_document_are_one_cluster(tmp_path):
    rng = np.random.default_rng(3)
    folders = []
    for name, canon, shift in (("a", "", 0.0), ("b", "A", -0.1)):
        run = planted_run(tmp_path / name, 0, model__canon_set=canon)
        values = [[float(x), 20] for x in rng.normal(60 + shift, 5, 120)]
        sources = [f"book {k // 10}" for k in range(120)]
        items = records({"nats_per_token": values}, sources=sources)
        primary = {"validation": {"primary": ["nats_per_token"]}}
        plant_answers(run, 20, "validation", {"validation": items}, described=primary)
        folders.append(run.path)
    a, b = [write(tmp_path / f"{path.name}.csv", exported(path)) for path in folders]

    row = only_row(compare(tmp_path, "--losses", b, "--against", a))

    expected = only_row(compare(tmp_path, *folders))
    assert row["num_clusters"] == expected["num_clusters"] == 12
    assert row["items_ci"] == pytest.approx(expected["items_ci"])
    assert row["difference"] == pytest.approx(expected["difference"])


def planted(path, *, count=20, seeds=2, shift=0.0, **options):
    """Write losses of `count` documents by `seeds` seeds; None in `options` drops a column."""
    rng = np.random.default_rng(7)
    rows = []
    for seed in range(seeds):
        for k, loss in enumerate(rng.normal(3 + shift, 0.1, count)):
            row = {"document": f"d{k}", "loss": loss, "weight": 10 + k, "seed": seed}
            rows.append({name: row[name] for name in row if options.get(name, True)})
    return write(path, rows)


def notes(tmp_path, options, against=None):
    a = planted(tmp_path / "a.csv", **(against or options))
    b = planted(tmp_path / "b.csv", shift=-0.2, **options)
    content = compare(tmp_path, "--losses", b, "--against", a)
    (row,) = content["pairs"]
    return row["verdict"], len(content["notes"])


def test_what_cannot_be_judged_is_said(tmp_path):
    assert notes(tmp_path, {}) == ("better", 0)
    assert notes(tmp_path, {"weight": None}) == ("better", 1)
    assert notes(tmp_path, {"count": 1}) == ("not judged", 0)
    assert notes(tmp_path, {"count": 1, "document": None}) == ("not judged", 1)
    assert notes(tmp_path, {"seeds": 1}) == ("not judged", 0)
    assert notes(tmp_path, {}, {"seeds": 1}) == ("within noise", 1)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "losses.column"),
        (HEADER, "losses.empty"),
        ("item,los,weight\nx,1,2\n", "losses.column"),
        ("item,loss,tokens\nx,1,2\n", "losses.column"),
        ("item,loss,loss\nx,1,2\n", "losses.column"),
        (HEADER + "x,1,2\n", "losses.value"),
        (HEADER + "x,1,2,0,5\n", "losses.value"),
        (HEADER + "x,one,2,0\n", "losses.value"),
        (HEADER + "x,nan,2,0\n", "losses.value"),
        (HEADER + "x,inf,2,0\n", "losses.value"),
        (HEADER + "x,1,0,0\n", "losses.value"),
        (HEADER + "x,1,-1,0\n", "losses.value"),
        (HEADER + ",1,2,0\n", "losses.value"),
        (HEADER + "x,1,2,\n", "losses.value"),
        (HEADER + "x,1,2,0\ny,1,2,0\nx,1,2,0\n", "losses.repeated"),
        ("loss\n1\n2\n", "losses.repeated"),
        (HEADER + "y,1,2,0\n", "losses.items"),
        (HEADER + "x,1,2,0\ny,1,2,0\n", "losses.items"),
        (HEADER + "x,1,3,0\n", "losses.weights"),
        ("item,loss\nx,1\n", "losses.weights"),
        (HEADER + '"' + "x" * 200_000 + '",1,2,0\n', "losses.not_csv"),
    ],
)
def test_bad_files_are_refused(tmp_path, text, code):
    good = tmp_path / "good.csv"
    good.write_text("\ufeff" + HEADER + "x,1,2,0\n")
    bad = tmp_path / "bad.csv"
    bad.write_text(text)

    for sides in (([good], [bad]), ([bad], [good])):
        with refused(code):
            losses.read_sides(*sides)


def test_other_encodings_are_refused(tmp_path):
    path = tmp_path / "latin.csv"
    path.write_bytes((HEADER + "é,1,2,0\n").encode("latin-1"))
    with refused("losses.not_csv"):
        losses.read_sides([path], [])


@pytest.mark.parametrize(
    "words",
    [
        ("--losses", "b.csv"),
        ("--against", "a.csv"),
        ("run", "--losses", "b.csv", "--against", "a.csv"),
        ("--a", "run", "--losses", "b.csv", "--against", "a.csv"),
        ("--losses", "b.csv", "--against", "a.csv", "--step", "0"),
        ("--losses", "b.csv", "--against", "a.csv", "--suite", "jrt"),
    ],
)
def test_losses_have_two_sides_and_nothing_else(capsys, words):
    assert command_error(capsys, eval_main, ["compare", *words]) == "compare.losses"


def test_a_file_is_passed_once(tmp_path):
    path = planted(tmp_path / "a.csv")
    with refused("run.given_twice"):
        losses.read_sides([path], [path])


def test_a_seed_of_two_files_counts_once(tmp_path):
    a = planted(tmp_path / "a.csv")
    b, b_again = [planted(tmp_path / f"{name}.csv", shift=-0.2) for name in ("b", "c")]

    (row,) = compare(tmp_path, "--losses", b, b_again, "--against", a)["pairs"]

    assert row["num_runs"] == [2, 2]
