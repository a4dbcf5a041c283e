"""Tasks with `release = true` beside the author's code, and each line of ERRATA.md.

`make test-release CLONE=PATH TOKENIZER=PATH` names a clone of facebookresearch/PhysicsLM4 and
GPT-2's tokenizer.json; without the latter, a tokenizer that is trained here replaces it. Generators
are compared by chi-square or Kolmogorov-Smirnov tests of the parts of their instances: no p value
times the number of parts is below 0.01 (Holm), for fixed seeds.
"""

import ast
import collections
import functools
import itertools
import json
import math
import random

import numpy as np
import pytest
import tokenizers
from scipy import stats

from canon_pretrain.synthetic.capo import ATTRIBUTES, ROLES, draw_people
from canon_pretrain.synthetic.grammar import Grammar
from canon_pretrain.synthetic.lano import GRAMMARS
from canon_pretrain.synthetic.release_words import MONTHS, read_release
from canon_pretrain.synthetic.tasks import build_task
from tests.synthetic import reference_brevo, reference_depo, release_clone
from tests.synthetic.distributions import assert_same
from tests.synthetic.release_clone import BOS, CLONE, FOLDER, IMPORTS, TOKENIZER
from tests.synthetic.release_stand_in import write_tokenizer

pytestmark = [
    pytest.mark.release,
    pytest.mark.skipif(not CLONE, reason="no clone: make test-release CLONE=PATH"),
]
QUERY = BOS - 2
ANS = EOS = BOS - 1
DEPO_ANS = 9500
DEPO_QUERY = 9000
NUM_TEMPLATES = (46, 49, 49, 52, 48, 47)
"""Of Capo's sentences, by attribute."""


def instances(task, count, seed=1):
    """Yield the ids of instances and which of them the loss counts."""
    for first in range(0, count, 500):
        ids, kinds, ends = task.instances(seed, first, min(500, count - first))
        counted = task.is_counted(kinds).astype(int)
        for start, end in zip([0, *ends], ends, strict=False):
            yield ids[start:end].tolist(), counted[start:end].tolist()


def assert_right(task, ids, is_answer):
    """Assert that the task's scorer accepts the answers of an instance."""
    runs = [
        [place for place, _ in group]
        for value, group in itertools.groupby(enumerate(is_answer), lambda pair: pair[1])
        if value
    ]
    assert runs
    for first, *rest in runs:
        end = [first, *rest][-1] + 1
        assert task.judge(ids[:first], ids[first:end]).verdict == "right"


# Depo


def depo_settings(name):
    return {
        "depo1": {"n": 7, "k": 3, "vocab": 4, "name_tokens": (1, 2)},
        "depo2": {"n": 9, "k": 5, "name_tokens": (2, 3)},
        "depo1, paper": {"n": 225, "k": 8},
        "depo2, paper": {"n": 75, "k": 16},
    }[name]


@pytest.mark.parametrize(
    ("name", "count"),
    [("depo1", 3000), ("depo2", 3000), ("depo1, paper", 400), ("depo2, paper", 400)],
)
def test_depo_is_generated_alike(name, count):
    settings = depo_settings(name)
    task = build_task(name[:5], settings | {"seq_len": 2048, "release": True})
    low, high = task.name_tokens
    module = release_clone.depo()
    module["rng"].seed(7)

    ours = []
    theirs = []
    for ids, counted in instances(task, count):
        edges, queries = reference_depo.read(ids, task.vocab, DEPO_QUERY)
        ours.append(reference_depo.features(edges, queries))

        instance = module["depo_data"](
            task.n, task.k, mini_vocab=task.vocab, min_tlen=low, max_tlen=high
        )
        their_edges, their_queries = reference_depo.read(instance[0], task.vocab, DEPO_QUERY)
        theirs.append(reference_depo.features(their_edges, their_queries))

        # The same ids, and labels on the same tokens
        assert reference_depo.labels(ids, DEPO_ANS, DEPO_QUERY) == counted
        assert reference_depo.labels(instance[0], DEPO_ANS, DEPO_QUERY) == instance["label"]
        is_answer = [
            label and token != DEPO_ANS
            for token, label in zip(instance[0], instance["label"], strict=True)
        ]
        assert_right(task, instance[0], is_answer)
    assert_same(ours, theirs)


# Brevo


def read_brevo(ids, vocab):
    """Return the edges, the query and the answer of the release's ids."""
    query_place = ids.index(QUERY)
    answer_place = ids.index(ANS)
    names = reference_brevo.split(ids[1:query_place], vocab)
    edges = list(zip(names[::2], names[1::2], strict=True))
    [query] = reference_brevo.split(ids[query_place + 1 : answer_place], vocab)
    assert (ids[0], ids[-1]) == (BOS, EOS)
    return edges, query, reference_brevo.split(ids[answer_place + 1 : -1], vocab)


def brevo_features(ids, vocab):
    edges, query, answer = read_brevo(ids, vocab)
    assert answer[-1] == query
    return reference_brevo.features(edges, query, answer[:-1])


def their_brevo(n, is_multi, count):
    """Yield ids and labels of the release's instances."""
    module = release_clone.brevo()
    module["rng"].seed(5)
    for _ in range(count):
        instance = module["topsort_data"](n, multi=is_multi)
        yield instance[0], instance["label"]


BREVO = [("brevo1", 12, 4000), ("brevo2", 14, 4000), ("brevo1", 110, 300), ("brevo2", 50, 300)]


@pytest.mark.parametrize(("name", "n", "count"), BREVO)
def test_brevo_is_generated_alike(name, n, count):
    task = build_task(name, {"n": n, "seq_len": 1536, "release": True})
    vocab = 4 if name == "brevo2" else None
    ours = []
    for ids, counted in instances(task, count):
        assert counted == [0] * ids.index(ANS) + [1] * (len(ids) - ids.index(ANS))
        ours.append(brevo_features(ids, vocab))

    theirs = []
    for ids, label in their_brevo(n, name == "brevo2", count):
        place = ids.index(ANS)
        assert label == [0] * place + [1] * (len(ids) - place)
        assert_right(task, ids, [0] * (place + 1) + [1] * (len(ids) - place - 1))
        theirs.append(brevo_features(ids, vocab))
    assert_same(ours, theirs)


@pytest.mark.parametrize(("name", "n", "count"), BREVO[:2])
@pytest.mark.parametrize("last_query", [False, True])
def test_brevo_of_the_paper_differs_from_the_release(name, n, count, last_query):
    """The comparison sees the query, and the leaves alone."""
    task = build_task(name, {"n": n, "seq_len": 1536, "last_query": last_query})
    vocab = 4 if name == "brevo2" else None
    bos = task.vocab_size - 4
    ours = [
        reference_brevo.features(*reference_brevo.read(ids, bos, vocab))
        for ids, _ in instances(task, count)
    ]
    theirs = [brevo_features(ids, vocab) for ids, _ in their_brevo(n, name == "brevo2", count)]
    with pytest.raises(AssertionError):
        assert_same(ours, theirs)


def brevo_parser(name):
    """Return the release's scorer of ids that end in <bos>, as it wants them."""
    scorer = release_clone.brevo()["TopoSortDepthStats"]
    parse = scorer.parse_tokens_multi if name == "brevo2" else scorer.parse_tokens
    return lambda ids: parse([*ids[:-1], BOS])[0]


@pytest.mark.parametrize(("name", "n"), [("brevo1", 12), ("brevo2", 14), ("brevo1", 60)])
def test_brevos_scorers_agree(name, n):
    task = build_task(name, {"n": n, "seq_len": 1536, "release": True})
    vocab = 4 if name == "brevo2" else None
    their_scorer = brevo_parser(name)
    rng = random.Random(3)
    verdicts = collections.Counter()
    for ids, _ in itertools.islice(instances(task, 300), 300):
        assert their_scorer(ids)
        edges, query, answer = read_brevo(ids, vocab)
        start = ids.index(ANS) + 1
        orders = [[*reference_brevo.order(rng, edges, query), query] for _ in range(3)]
        others = {name for edge in edges for name in edge} - set(answer)
        wrong = list(reference_brevo.mutated(rng, edges, query, answer)) if others else []
        for names in (*orders, answer[:-1], *wrong):
            if len(set(names)) < len(names):
                continue  # duplicates: test_duplicates_are_accepted
            changed = [*itertools.chain.from_iterable(names), EOS]
            verdict = task.judge(ids[:start], changed).verdict
            assert (verdict == "right") == their_scorer([*ids[:start], *changed])
            verdicts[verdict] += 1
    assert min(verdicts["right"], verdicts["wrong"]) > 300


# Mano


def mano_features(ids):
    """Return what is random in an instance of the release's ids."""
    bos, length_mark, *expression, ans, value = ids
    length = length_mark // 10
    assert ans // 10 == length and len(expression) == 2 * length + 1
    stack = []
    nodes = []
    for token in reversed(expression):
        if token >= 5000:
            stack.append((token - 5000, 0))
            continue
        (a, left), (b, right) = stack.pop(), stack.pop()
        operator = (token - 1) % 4
        stack.append(((a + b, a - b, a * b)[operator] % 23, left + right + 1))
        nodes.append((left + right + 1, left, operator))
    assert stack == [(value - 5000, length)]
    return {
        "bos": bos,
        "length": length_mark,
        "answer mark": ans,
        "value": value,
        "first": expression[0],
        "last": expression[-1],
        "root": nodes[-1],
        "a node": nodes[len(nodes) // 2],
        "a token": expression[len(expression) // 2],
    }


def test_mano_is_generated_alike():
    count = 6000
    task = build_task("mano", {"l": 6, "release": True})
    module = release_clone.mano()
    rng = random.Random(4)
    lengths = list(range(1, 7))
    ours = [mano_features(ids) for ids, _ in instances(task, count)]
    theirs = []
    for _ in range(count):
        ids = module["encode_pure_arithmetic"](rng, qids=lengths, lens=lengths, ops=["+", "-", "*"])
        assert task.judge(ids[:-1], ids[-1:]).verdict == "right"
        wrong = 5000 + (ids[-1] - 4999) % 23
        assert task.judge(ids[:-1], [wrong]).verdict == "wrong"
        theirs.append(mano_features(ids))
    assert_same(ours, theirs)


# Lano


@functools.cache
def lano_config(grammar, root, folder):
    """Return the release's grammar of the symbols that derive from `root`."""
    content = json.loads((FOLDER / "Lano-cfg" / "configs" / f"{grammar}.json").read_text())
    [level] = [level for level, row in enumerate(content["idx"]) if root in row]
    place = content["idx"][level].index(root)
    content["depth"] -= level
    content["sizes"] = [1, *content["sizes"][level + 1 :]]
    content["idx"] = [[root], *content["idx"][level + 1 :]]
    content["all"] = [[content["all"][level][place]], *content["all"][level + 1 :]]
    path = folder / f"{grammar}-{root}.json"
    path.write_text(json.dumps(content))
    config = release_clone.lano().from_graph(path)
    if not hasattr(config, "count"):
        config.count = max(itertools.chain.from_iterable(config.idx))
    return config


def sentence_features(sentence):
    return {
        "tokens": len(sentence),
        "first": tuple(sentence[:4]),
        "last": tuple(sentence[-4:]),
        "middle": tuple(sentence[len(sentence) // 2 :][:3]),
        "of 2": sentence.count(2),
    }


@pytest.mark.parametrize("grammar", ["cfg3f", "cfg3j", "cfg3k"])
def test_lano_has_the_releases_rules_and_sentences(grammar, tmp_path):
    task = build_task("lano", {"grammar": grammar, "seq_len": 1536, "release": True})
    root = next(iter(Grammar(GRAMMARS[grammar]).rules))
    config = lano_config(grammar, root, tmp_path)
    rules = {}
    for level in range(config.depth):
        for node in config.all[level]:
            rules[node.id] = [
                tuple(config.idx[level + 1][child] for child in rule) for rule in node.children
            ]
    assert rules == task.language.rules

    rng = random.Random(6)
    ours = [sentence_features(ids[1:]) for ids, _ in instances(task, 1000)]
    theirs = [sentence_features(config.generate_onedata_pure(rng)) for _ in range(1000)]
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    ("grammar", "root", "count"), [("cfg3f", 16, 10), ("cfg3k", 14, 10), ("cfg3f", 22, 1)]
)
def test_lanos_parsers_and_distributions_agree(grammar, root, count, tmp_path):
    task = build_task("lano", {"grammar": grammar, "root": root, "seq_len": 1536, "release": True})
    config = lano_config(grammar, root, tmp_path)
    rng = random.Random(8)
    verdicts = collections.Counter()
    their_sentences = [config.generate_onedata_pure(rng) for _ in range(count)]
    our_sentences = [ids[1:] for ids, _ in instances(task, count)]
    for sentence in their_sentences + our_sentences:
        # Valid by both, and as likely token by token
        rows, _ = config.solve_dp_prob_highprecision(sentence, debug=False)
        distribution = task.distribution(np.array([4, *sentence]))
        np.testing.assert_allclose(
            distribution[:, [4, 1, 2, 3]], np.array(rows), rtol=0, atol=1e-12
        )

        place = rng.randrange(len(sentence))
        changed = [*sentence[:place], sentence[place] % 3 + 1, *sentence[place + 1 :]]
        for text in (sentence, changed) if root != 22 else (sentence,):
            minimum = config.solve_dp_noneq_fast(text, no_debug=True)[0]
            verdict = task.judge([4], [*text, 4]).verdict
            assert (verdict == "right") == (minimum == 0)
            verdicts[verdict] += 1
    assert verdicts["right"] >= 2 * count


# Capo


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """GPT-2's tokenizer.json, or one that is trained on the release's texts."""
    if TOKENIZER:
        return TOKENIZER
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    texts = [path.read_text() for path in release_clone.CAPO.parent.rglob("*.*")]
    return write_tokenizer(path, texts)


class Chooser:
    """A module `random` that chooses the given places."""

    def __init__(self, places):
        self._places = iter(places)

    def choice(self, items):
        return items[next(self._places)]


@functools.cache
def lines(name):
    return (release_clone.CAPO.parent / "fields" / f"{name}.txt").read_text().splitlines()


def person_as_there(number, people):
    """Return a person as the release's functions take one."""
    words = [draw[number] for draw in people]
    first, middle, last, day, month, year, city, university, field, company, _ = words
    employer, work_city = lines("company")[company].split("; ")
    return {
        "id": number,
        "first_name": lines("first_name")[first],
        "middle_name": lines("middle_name")[middle],
        "last_name": lines("last_name")[last],
        "birthday": 1 + day,
        "birthmonth": MONTHS[month],
        "birthyear": 1900 + year,
        "birthcity": lines("city")[city],
        "university": lines("university")[university],
        "field": lines("field")[field],
        "company1name": employer,
        "company1city": work_city,
    }


def test_capos_texts_are_the_releases(tokenizer):
    """Each biography is what the release writes about the person, encoded as a whole."""
    encoder = tokenizers.Tokenizer.from_file(tokenizer)
    task = build_task(
        "capo",
        {"release": True, "release_path": CLONE, "release_tokenizer": tokenizer, "people": 600},
    )
    people = draw_people(np.arange(task.people, dtype=np.uint64))
    vocabulary = read_release(CLONE, tokenizer).vocabulary
    write = release_clone.run(release_clone.CAPO)["get_text_simple3"]
    roles = task.token_roles(task.windows(0, 0, 200).ids)
    assert set(roles.ravel().tolist()) == set(range(len(ROLES)))

    random_bits = task._random_bits(0, 0, task.people, 0)
    persons = task.person(random_bits[:, 0], 0).tolist()
    chosen = collections.defaultdict(collections.Counter)
    for person, (ids, _), bits in zip(
        persons, instances(task, task.people, seed=0), random_bits[:, 1:], strict=True
    ):
        pairs = zip(bits.tolist(), NUM_TEMPLATES, strict=True)
        places = [(word >> 32) * number >> 32 for word, number in pairs]
        for attribute, place in zip(ATTRIBUTES, places, strict=True):
            chosen[attribute][place] += 1
        # The release chooses a template for the city of work before that for the employer.
        *first, employer, city = places
        write.__globals__["random"] = Chooser([*first, city, employer])
        text = write(person_as_there(person, people), order=1)
        assert [vocabulary[token] for token in ids] == ["<bos>", *encoder.encode(text).tokens]

    # All templates are as likely, as there.
    counts = [
        [chosen[attribute][place] for place in range(number)]
        for attribute, number in zip(ATTRIBUTES, NUM_TEMPLATES, strict=True)
    ]
    assert min(stats.chisquare(row).pvalue for row in counts) > 0.01 / len(counts)


@pytest.mark.skipif(not TOKENIZER, reason="no GPT-2 tokenizer: make test-release TOKENIZER=PATH")
def test_capos_ids_are_as_many_as_the_paper_says():
    release = read_release(CLONE, TOKENIZER)
    assert len(release.vocabulary) - 1 == 3275


def test_capos_questions_have_one_answer(tokenizer):
    settings = {"release": True, "release_path": CLONE, "release_tokenizer": tokenizer}
    task = build_task("capo", settings | {"people": 200})
    questions = list(task.questions(0, 0, 30))
    assert len(questions) == 6 * 30 * task.per_window
    wrong = 0
    for (prompt, answer, _), (_, other, _) in itertools.pairwise(questions):
        assert task.judge(prompt, answer).verdict == "right"
        wrong += task.judge(prompt, other).verdict != "right"
    assert wrong > 0.95 * len(questions)


# ERRATA.md


class Recorder(random.Random):
    """Random numbers, and the arguments of the calls that drew them."""

    def __init__(self, seed):
        super().__init__(seed)
        self.bounds = []
        self.weights = []

    def randint(self, a, b):
        self.bounds.append((a, b))
        return super().randint(a, b)

    def choices(self, population, weights=None, **more):
        self.weights.append((list(population), list(weights)))
        return super().choices(population, weights, **more)


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        (release_clone.DEPO, ("random", "bos_token_id", "token_type")),
        (release_clone.BREVO, ("random", "defaultdict", "deque")),
        (release_clone.MANO, ("random",)),
    ],
    ids=["depo", "brevo", "mano"],
)
def test_modules_stop_at_missing_names(path, missing):
    available = {"bos_token_id": BOS, **IMPORTS}
    supplied = {}
    for name in missing:
        with pytest.raises(NameError) as stopped:
            release_clone.run(path, **supplied)
        assert stopped.value.name == name
        supplied[name] = available.get(name)


@pytest.mark.parametrize("name", ["get_text_simple3", "generate_prompt2"])
def test_capos_functions_lack_imports(name):
    text = release_clone.run(release_clone.CAPO)[name]
    person = collections.defaultdict(int)
    with pytest.raises(NameError) as stopped:
        text(person)
    assert stopped.value.name in ("random", "np")


def test_capos_permutation_returns_nothing():
    permute = release_clone.run(release_clone.CAPO, random=random)["augmentation_permutation2"]
    person = {"first_name": "Anya", "middle_name": "Briar", "last_name": "Forger"}
    text = "Anya Briar Forger was born in York. She studied law."
    assert permute(person, text) is None


def test_capo_makes_no_people():
    source = release_clone.CAPO.read_text()
    assert "last_name.txt" not in source and "1900" not in source
    assert {part.name for part in ast.parse(source).body} == {
        "generate_prompt2",
        "get_text_simple3",
        "augmentation_permutation2",
    }


def test_capo_has_the_city_before_the_employer():
    write = release_clone.run(release_clone.CAPO, random=random)["get_text_simple3"]
    person = collections.defaultdict(int, company1name="Employer Name", company1city="Work City")
    texts = [write(person), write(person, order=1)]
    is_employer_first = [text.index("Employer Name") < text.index("Work City") for text in texts]
    assert is_employer_first == [False, True]


def test_capos_prompts_run_together():
    tree = release_clone.function(release_clone.CAPO, "generate_prompt2")
    lists = [part.value for part in ast.walk(tree) if isinstance(part, ast.Assign)]
    sentences = list(
        itertools.chain.from_iterable(
            ast.literal_eval(value) for value in lists if isinstance(value, ast.List) and value.elts
        )
    )
    assert [sentence.count("{company1name}") for sentence in sentences].count(2) == 1


def test_the_weight_of_n():
    """1 / (n + sqrt N), not 1 / sqrt(N + n)."""
    pairs = ((release_clone.depo(), "depo_data"), (release_clone.brevo(), "topsort_data"))
    for module, generate in pairs:
        for size in (10, 110):
            recorder = module["rng"] = Recorder(0)
            arguments = {"K": 4, "mini_vocab": 50} if generate == "depo_data" else {}
            module[generate](size, **arguments)
            sizes, weights = recorder.weights[0]
            released = np.array([1 / (n + math.sqrt(size)) for n in sizes])
            printed = np.array([1 / math.sqrt(size + n) for n in sizes])
            assert sizes == list(range(3, size + 1))
            np.testing.assert_allclose(weights, released / released.sum(), rtol=1e-9)
            assert abs(weights - printed / printed.sum()).max() > 0.01


def leaf_bound(n):
    """Return the most leaves that the release draws for n vertices."""
    graph = release_clone.brevo()["TopoSortDepthStats"](n, vocab_size=n)
    recorder = Recorder(0)
    graph.generate_dag(recorder)
    first, *_ = recorder.bounds
    return first[1]


def test_leaves_are_the_floor():
    bounds = {n: leaf_bound(n) for n in range(3, 111, 9)} | {n: leaf_bound(n) for n in (4, 5, 110)}
    assert bounds == {n: (n - 1) // 4 + 1 for n in bounds}
    papers = [math.ceil((n - 1) / 4) + 1 for n in range(3, 111)]
    released = [(n - 1) // 4 + 1 for n in range(3, 111)]
    assert sum(a != b for a, b in zip(papers, released, strict=True)) == 81


def test_the_query_is_the_last_vertex():
    graph = release_clone.brevo()["TopoSortDepthStats"](40, vocab_size=40)
    rng = random.Random(0)
    for _ in range(50):
        state = rng.getstate()
        nodes, _ = graph.generate_dag(rng)
        rng.setstate(state)
        _, order, _ = graph.generate_sample(rng)
        # and the answer ends with it
        assert order[-1] == nodes[-1]


def test_a_leaf_may_have_no_edge():
    fewer = 0
    graph = release_clone.brevo()["TopoSortDepthStats"](40, vocab_size=40)
    rng = random.Random(0)
    for _ in range(200):
        _, dag = graph.generate_dag(rng)
        shown = set(dag) | set(itertools.chain.from_iterable(dag.values()))
        fewer += len(shown) < 40
    assert fewer > 0


@pytest.mark.parametrize("is_multi", [False, True])
def test_the_scorer_accepts_none_of_its_own_answers(is_multi):
    module = release_clone.brevo()
    scorer = module["TopoSortDepthStats"]
    parse = scorer.parse_tokens_multi if is_multi else scorer.parse_tokens
    generated = [module["topsort_data"](20, multi=is_multi)[0] for _ in range(200)]
    assert not any(parse(ids)[0] for ids in generated)
    assert all(parse([*ids[:-1], BOS])[0] for ids in generated)


def test_the_answer_mark_is_eos():
    for ids, _ in their_brevo(20, False, 50):
        assert ids.count(EOS) == 2 and ids[-1] == EOS


@pytest.mark.parametrize("name", ["brevo1", "brevo2"])
def test_duplicates_are_accepted(name):
    """By the release, not by the paper and not here."""
    task = build_task(name, {"n": 12, "seq_len": 1536, "release": True})
    vocab = 4 if name == "brevo2" else None
    their_scorer = brevo_parser(name)
    for ids, _ in itertools.islice(instances(task, 100), 100):
        _, _, answer = read_brevo(ids, vocab)
        start = ids.index(ANS) + 1
        repeated = [*itertools.chain.from_iterable([answer[0], *answer]), EOS]
        assert their_scorer([*ids[:start], *repeated])
        assert task.judge(ids[:start], repeated).verdict != "right"


def test_depo2_has_a_vocabulary_of_3():
    module = release_clone.depo()
    ids = set()
    for _ in range(50):
        ids |= set(module["depo_data"](N=75, K=16)[0])
    assert {token for token in ids if token < DEPO_QUERY} == set(range(1, 7))


def test_depo_is_tested_at_powers_of_two():
    module = release_clone.depo()
    hops = collections.Counter()
    for _ in range(100):
        text = module["depo_data"](N=20, K=12, QA=True, mini_vocab=50, min_tlen=1, max_tlen=2)[0]
        hops.update(token - DEPO_QUERY for token in text if DEPO_QUERY < token < DEPO_ANS)
    assert set(hops) == {1, 2, 4, 8, 12}


def test_mano_has_two_ids_per_mark_and_an_answer_mark_per_length():
    module = release_clone.mano()
    rng = random.Random(0)
    ids_of_length = collections.defaultdict(set)
    for _ in range(2000):
        bos, length, *_, ans, _ = module["encode_pure_arithmetic"](
            rng, qids=[1, 2, 3], lens=[1, 2, 3], ops=["+", "-", "*"]
        )
        ids_of_length[length // 10] |= {bos, length, ans}
    assert ids_of_length == {
        n: {BOS - 1, BOS, 10 * n, 10 * n + 1, 10 * n + 4, 10 * n + 5} for n in (1, 2, 3)
    }


def test_lano_imports_a_package_for_new_grammars_only():
    tree = ast.parse(release_clone.LANO.read_text())
    uses = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and "xlsxwriter" in ast.unparse(function)
    ]
    assert uses == ["build_graph"]
    assert "import xlsxwriter" in release_clone.LANO.read_text()


def test_lano_lacks_the_fast_distribution():
    config = release_clone.lano()
    assert hasattr(config, "solve_dp_prob_highprecision") and not hasattr(config, "solve_dp_prob")
    for number in (2, 3):
        [demo] = (FOLDER / "Lano-cfg").glob(f"demo{number}*.py")
        assert "config.solve_dp_prob " in demo.read_text()


def test_lanos_numbers_of_derivations_are_wrong(tmp_path):
    """6 -> 5 5, 5 -> 1 1 | 1 1 1 derives five tokens in two ways: 2 + 3 and 3 + 2."""
    grammar = {
        "depth": 2,
        "num_sym": 1,
        "vocab_size": 1,
        "count": 6,
        "sizes": [1, 1, 1],
        "idx": [[6], [5], [1]],
        "all": [
            [{"name": "6", "children": [[0, 0]]}],
            [{"name": "5", "children": [[0, 0], [0, 0, 0]]}],
            [{"name": "1"}],
        ],
    }
    path = tmp_path / "grammar.json"
    path.write_text(json.dumps(grammar))
    config = release_clone.lano().from_graph(path)
    counts = {
        length: config.solve_dp_noneq_fast([1] * length, no_debug=True)[3] for length in range(3, 8)
    }
    assert counts == {3: None, 4: 1, 5: 3, 6: 1, 7: None}
