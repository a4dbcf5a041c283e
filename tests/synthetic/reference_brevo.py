"""Brevo, written from the paper's appendix A.2 with plain loops; no code of the product."""

import math

from tests.synthetic.reference_depo import draw_names


def draw(rng, *, n, weight, last_query=False, exact_n=False, vocab=None, name_tokens=None):
    """Return the edges (x, y: y depends on x), the query and an answer; names are tuples of ids."""
    sizes = [n] if exact_n else list(range(3, n + 1))
    (size,) = rng.choices(sizes, [weight(s, n) for s in sizes])
    edges, out_degree = [], [0] * size
    for vertex in range(rng.randint(1, math.ceil((size - 1) / 4) + 1), size):
        possible = [u for u in range(vertex) if out_degree[u] <= 3]
        for parent in rng.sample(possible, rng.randint(1, min(4, len(possible)))):
            edges.append((parent, vertex))
            out_degree[parent] += 1
    query = size - 1 if last_query else rng.choice(range(math.floor(size * 3 / 4), size))
    if vocab is None:
        names = [(v,) for v in rng.sample(range(1, n + 1), size)]
    else:
        names = draw_names(rng, size, vocab, name_tokens)
    rng.shuffle(names)
    edges = [(names[x], names[y]) for x, y in edges]
    rng.shuffle(edges)
    return edges, names[query], order(rng, edges, names[query])


def needs(edges, query):
    """Return the distance from the query of all that it depends on."""
    distance, todo = {query: 0}, [query]
    for vertex in todo:
        for x, y in edges:
            if y == vertex and x not in distance:
                distance[x] = distance[vertex] + 1
                todo.append(x)
    del distance[query]
    return distance


def depth(edges, query):
    """Return the length of the shortest path from the query to a leaf."""
    children = {y for _, y in edges}
    return min(far for vertex, far in needs(edges, query).items() if vertex not in children)


def order(rng, edges, query):
    """Return what the query depends on in order, by choosing from the end among what is ready."""
    left, answer = sorted(needs(edges, query)), []
    while left:
        waiting = {x for x, y in edges if y in left}
        answer.insert(0, rng.choice([vertex for vertex in left if vertex not in waiting]))
        left.remove(answer[0])
    return answer


def is_right(edges, query, answer):
    """Return whether `answer` is what the query depends on, in a topological order."""
    if len(answer) != len(set(answer)) or set(answer) != set(needs(edges, query)):
        return False
    places = {name: place for place, name in enumerate(answer)}
    return all(places[x] < places[y] for x, y in edges if y in places)


def mutated(rng, edges, query, answer):
    """Yield wrong answers: swapped, dropped, added, duplicate, replaced, with the query."""
    places = {name: place for place, name in enumerate(answer)}
    pairs = [(places[x], places[y]) for x, y in edges if x in places and y in places]
    if pairs:
        a, b = rng.choice(pairs)
        swapped = answer.copy()
        swapped[a], swapped[b] = answer[b], answer[a]
        yield from (swapped, answer[b:] + answer[:b])
    place, name = rng.randrange(len(answer)), rng.choice(answer)
    others = sorted({name for edge in edges for name in edge} - set(answer))
    yield answer[:place] + answer[place + 1 :]
    yield [*answer[:place], name, *answer[place:]]
    yield [*answer, query]
    yield [*answer[:place], rng.choice(others), *answer[place:]]
    yield [*answer[:place], rng.choice(others), *answer[place + 1 :]]


def split(ids, vocab):
    """Return the names that ids consist of."""
    names, name = [], ()
    for token in ids:
        name = (*name, token)
        if vocab is None or token > vocab:
            names.append(name)
            name = ()
    return names


def read(ids, mark, vocab):
    """Return the edges, query and answer that an instance shows; `mark`: the id of <bos>."""
    query, ans = ids.index(mark + 1), ids.index(mark + 2)
    names = split(ids[1:query], vocab)
    (asked,) = split(ids[query + 1 : ans], vocab)
    edges = list(zip(names[::2], names[1::2], strict=True))
    return edges, asked, split(ids[ans + 1 : -1], vocab)


def show(edges, query, answer, mark):
    """Return the ids of an instance, and their kinds: 0 problem, 1 mark, 2 answer."""
    ids = [mark, *(token for edge in edges for name in edge for token in name), mark + 1, *query]
    answer = [*(token for name in answer for token in name), mark + 3]
    return ids + [mark + 2] + answer, [0] * len(ids) + [1] + [2] * len(answer)


def features(edges, query, answer):
    """Return what is compared between generators, a value per instance and feature."""
    parents, children = {}, {}
    for x, y in edges:
        parents.setdefault(y, []).append(x)
        children.setdefault(x, []).append(y)
    leaves = children.keys() - parents.keys()
    return {
        "length": sum(len(x) + len(y) for x, y in edges) + sum(map(len, answer)),
        "vertices": len(children.keys() | parents.keys()),
        "edges": len(edges),
        "leaves": len(leaves),
        **{f"in {d}": sum(len(v) == d for v in parents.values()) for d in (1, 2, 3, 4)},
        **{f"out {d}": sum(len(v) == d for v in children.values()) for d in (1, 2, 3, 4)},
        "depth": depth(edges, query),
        "answer": len(answer),
        "children of the query": len(children.get(query, [])),
        "parents of the query": len(parents[query]),
        "leaves first": next((k for k, v in enumerate(answer) if v not in leaves), len(answer)),
        "last parents": sum(vertex in parents[query] for vertex in answer[-3:]),
        "first place": next(k for k, edge in enumerate(edges) if answer[-1] in edge),
        "query's place": next(k for k, (_, y) in enumerate(edges) if y == query),
        "query's name": query,
        "first name": edges[0][0],
        "name tokens": len(edges[-1][1]),
    }
