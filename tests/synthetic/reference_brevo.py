"""Brevo, written from the paper's appendix A.2 with plain loops; no code of the product."""

import math

from tests.synthetic.reference_depo import draw_names

MAX_DEGREE = 4
"""Edges into a vertex, and out of one."""


def draw(rng, *, n, weight, last_query=False, exact_n=False, vocab=None, name_tokens=None):
    """Return the edges (x, y: y depends on x), the query and an answer; names are tuples of ids."""
    sizes = [n] if exact_n else list(range(3, n + 1))
    (size,) = rng.choices(sizes, [weight(s, n) for s in sizes])

    # The first vertices are leaves; each of the others depends on some before it.
    num_leaves = rng.randint(1, math.ceil((size - 1) / 4) + 1)
    edges = []
    out_degree = [0] * size
    for vertex in range(num_leaves, size):
        possible = [u for u in range(vertex) if out_degree[u] < MAX_DEGREE]
        in_degree = rng.randint(1, min(MAX_DEGREE, len(possible)))
        for parent in rng.sample(possible, in_degree):
            edges.append((parent, vertex))
            out_degree[parent] += 1
    query = size - 1 if last_query else rng.choice(range(math.floor(size * 3 / 4), size))

    # Names, then edges in random order.
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
    distance = {query: 0}
    todo = [query]
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
    distances = needs(edges, query)
    return min(distance for vertex, distance in distances.items() if vertex not in children)


def order(rng, edges, query):
    """Return what the query depends on in order, by choosing from the end among what is ready."""
    left = sorted(needs(edges, query))
    answer = []
    while left:
        waiting = {x for x, y in edges if y in left}
        ready = [vertex for vertex in left if vertex not in waiting]
        vertex = rng.choice(ready)
        answer.insert(0, vertex)
        left.remove(vertex)
    return answer


def is_right(edges, query, answer):
    """Return whether `answer` is what the query depends on, in a topological order."""
    if len(answer) != len(set(answer)) or set(answer) != set(needs(edges, query)):
        return False
    places = {name: place for place, name in enumerate(answer)}
    return all(places[x] < places[y] for x, y in edges if y in places)


def mutated(rng, edges, query, answer):
    """Yield wrong answers: swapped, dropped, added, duplicate, replaced, with the query."""
    # two vertices, of which one depends on the other, swapped; and all from the second one first
    places = {name: place for place, name in enumerate(answer)}
    pairs = [(places[x], places[y]) for x, y in edges if x in places and y in places]
    if pairs:
        a, b = rng.choice(pairs)
        swapped = answer.copy()
        swapped[a], swapped[b] = answer[b], answer[a]
        yield swapped
        yield answer[b:] + answer[:b]

    place = rng.randrange(len(answer))
    before = answer[:place]
    after = answer[place + 1 :]
    duplicate = rng.choice(answer)
    others = sorted({name for edge in edges for name in edge} - set(answer))
    yield before + after
    yield [*before, duplicate, answer[place], *after]
    yield [*answer, query]
    yield [*before, rng.choice(others), answer[place], *after]
    yield [*before, rng.choice(others), *after]


def split(ids, vocab):
    """Return the names that ids consist of."""
    names = []
    name = ()
    for token in ids:
        name = (*name, token)
        if vocab is None or token > vocab:
            names.append(name)
            name = ()
    return names


def read(ids, mark, vocab):
    """Return the edges, query and answer that an instance shows; `mark`: the id of <bos>."""
    query_place = ids.index(mark + 1)
    answer_place = ids.index(mark + 2)
    names = split(ids[1:query_place], vocab)
    edges = list(zip(names[::2], names[1::2], strict=True))
    (query,) = split(ids[query_place + 1 : answer_place], vocab)
    return edges, query, split(ids[answer_place + 1 : -1], vocab)


def show(edges, query, answer, mark):
    """Return the ids of an instance, and their kinds: 0 problem, 1 mark, 2 answer."""
    problem = [mark]
    for x, y in edges:
        problem += [*x, *y]
    problem += [mark + 1, *query]

    answer_ids = []
    for name in answer:
        answer_ids += name
    answer_ids.append(mark + 3)

    kinds = [0] * len(problem) + [1] + [2] * len(answer_ids)
    return [*problem, mark + 2, *answer_ids], kinds


def features(edges, query, answer):
    """Return what is compared between generators, a value per instance and feature."""
    parents = {}
    children = {}
    for x, y in edges:
        parents.setdefault(y, []).append(x)
        children.setdefault(x, []).append(y)
    leaves = children.keys() - parents.keys()

    values = {
        "length": sum(len(x) + len(y) for x, y in edges) + sum(map(len, answer)),
        "vertices": len(children.keys() | parents.keys()),
        "edges": len(edges),
        "leaves": len(leaves),
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
    for degree in range(1, MAX_DEGREE + 1):
        values[f"in {degree}"] = sum(len(names) == degree for names in parents.values())
        values[f"out {degree}"] = sum(len(names) == degree for names in children.values())
    return values
