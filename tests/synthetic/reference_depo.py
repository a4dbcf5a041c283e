"""Depo, written from the paper's appendix A.1 with plain loops; no code of the product."""

from math import sqrt


def draw_names(rng, size, vocab, name_tokens):
    """Return distinct names, in the order in which they were drawn."""
    names = []
    while len(names) < size:
        body = [rng.randint(1, vocab) for _ in range(rng.randint(*name_tokens) - 1)]
        name = (*body, vocab + rng.randint(1, vocab))
        if name not in names:
            names.append(name)
    return names


def draw(rng, *, n, k, vocab, name_tokens, weight=lambda n, max_n: 1 / (n + sqrt(max_n))):
    """Return the edges (x, y) and queries (k, q, a) of an instance; names are tuples of ids."""
    sizes = range(3, n + 1)
    (size,) = rng.choices(sizes, [weight(s, n) for s in sizes])
    names = draw_names(rng, size, vocab, name_tokens)
    rng.shuffle(names)
    edges = [(names[i], names[(i + 1) % size]) for i in range(size)]
    rng.shuffle(edges)

    queries = []
    for node in rng.sample(names, min(10, size)):
        hops = rng.randint(1, k)
        queries.append((hops, node, walk(edges, node, hops)))
    return edges, queries


def walk(edges, node, hops):
    """Return the node `hops` edges after `node`."""
    for _ in range(hops):
        (node,) = [y for x, y in edges if x == node]
    return node


def read(ids, vocab, query_mark=None):
    """Return the edges and queries that the ids of a whole instance show.

    `query_mark` is the id of a query for no hops.
    """
    if query_mark is None:
        query_mark = 2 * vocab + 2
    # A name ends with an id above vocab; marks are names of one id, above 2 vocab.
    names = []
    name = ()
    for token in ids:
        name = (*name, token)
        if token > vocab:
            names.append(name)
            name = ()

    start = next(i for i, name in enumerate(names[1:], 1) if name[0] > 2 * vocab)
    edges = list(zip(names[1:start:2], names[2:start:2], strict=True))
    queries = []
    for hops_mark, node, answer in zip(
        names[start::4], names[start + 1 :: 4], names[start + 3 :: 4], strict=True
    ):
        queries.append((hops_mark[0] - query_mark, node, answer))
    return edges, queries


def labels(ids, answer_mark, query_mark):
    """Return which ids count, 0 or 1: from each answer mark to the next query."""
    counted = []
    is_counted = 0
    for token in ids:
        if token == answer_mark:
            is_counted = 1
        elif token > query_mark:
            is_counted = 0
        counted.append(is_counted)
    return counted


def show(edges, queries, vocab):
    """Return the ids of an instance, and their kinds: 0 problem, 1 mark, 2 answer."""
    bos = 2 * vocab + 1
    answer_mark = 2 * vocab + 2
    ids = [bos]
    for x, y in edges:
        ids += [*x, *y]
    kinds = [0] * len(ids)
    for hops, node, answer in queries:
        ids += [answer_mark + hops, *node, answer_mark, *answer]
        kinds += [0] * (1 + len(node)) + [1] + [2] * len(answer)
    return ids, kinds


def features(edges, queries):
    """Return what is compared between generators, one value per instance and feature."""
    n = len(edges)
    nodes = [x for x, _ in edges]
    successors = [y for _, y in edges]
    places = [nodes.index(q) for _, q, _ in queries]
    lengths = [len(x) for x in nodes]
    return {
        "n": n,
        "length": len(show(edges, queries, 0)[0]),
        "first name": nodes[0],
        "last name": successors[-1],
        "number of shortest names": lengths.count(min(lengths)),
        "edges between names of one length": sum(len(x) == len(y) for x, y in edges),
        "place of the second edge of the cycle": (n, nodes.index(successors[0])),
        "place of the edge before": (n, successors.index(nodes[0])),
        "k": (queries[0][0], queries[-1][0]),
        "number of queries": (n, len(queries)),
        "place of the first question": (n, places[0]),
        "place of the first answer": (n, nodes.index(queries[0][2])),
        "two questions": (n, places[0], places[1]) if n < 7 else (places[0] < places[-1],),
        "length of question and answer": (len(queries[0][1]), len(queries[0][2])),
    }
