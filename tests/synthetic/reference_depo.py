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


def draw(rng, *, n, k, vocab, name_tokens, weight=lambda n, most: 1 / (n + sqrt(most))):
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


def read(ids, vocab):
    """Return the edges and queries that the ids of a whole instance show."""
    words, name = [], ()
    for token in ids:
        name = (*name, token)
        if token > vocab:
            words.append(name)
            name = ()
    start = next(i for i, word in enumerate(words[1:], 1) if word[0] > 2 * vocab)
    edges = list(zip(words[1:start:2], words[2:start:2], strict=True))
    queries = zip(words[start::4], words[start + 1 :: 4], words[start + 3 :: 4], strict=True)
    return edges, [(query[0] - 2 * vocab - 2, node, answer) for query, node, answer in queries]


def show(edges, queries, vocab):
    """Return the ids of an instance, and their kinds: 0 problem, 1 mark, 2 answer."""
    ids = [2 * vocab + 1, *(token for edge in edges for name in edge for token in name)]
    kinds = [0] * len(ids)
    for hops, node, answer in queries:
        ids += [2 * vocab + 2 + hops, *node, 2 * vocab + 2, *answer]
        kinds += [0] + [0] * len(node) + [1] + [2] * len(answer)
    return ids, kinds


def features(edges, queries):
    """Return what is compared between generators, one value per instance and feature."""
    n, nodes = len(edges), [x for x, _ in edges]
    places = [nodes.index(q) for _, q, _ in queries]
    lengths = [len(x) for x in nodes]
    return {
        "n": n,
        "length": len(show(edges, queries, 0)[0]),
        "first name": nodes[0],
        "last name": edges[-1][1],
        "number of shortest names": lengths.count(min(lengths)),
        "edges between names of one length": sum(len(x) == len(y) for x, y in edges),
        "place of the second edge of the cycle": (n, nodes.index(edges[0][1])),
        "place of the edge before": (n, [y for _, y in edges].index(nodes[0])),
        "k": (queries[0][0], queries[-1][0]),
        "number of queries": (n, len(queries)),
        "place of the first question": (n, places[0]),
        "place of the first answer": (n, nodes.index(queries[0][2])),
        "two questions": (n, places[0], places[1]) if n < 7 else (places[0] < places[-1],),
        "length of question and answer": (len(queries[0][1]), len(queries[0][2])),
    }
