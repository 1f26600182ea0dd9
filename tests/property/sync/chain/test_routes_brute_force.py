"""The planner against trying everything: the same cost, and a way that is one."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from deltawire.sync.chain.routes import CheapestRoutes, Edge

VERSIONS = 7


@st.composite
def bundles(draw):
    """Edges between few versions: forward ones, backward ones, loops, doubles, anchors."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.one_of(st.none(), st.integers(0, VERSIONS)),
                st.integers(0, VERSIONS),
                st.integers(0, 5),
            ),
            max_size=11,
        )
    )
    return [
        Edge(base, target, cost, "anchor" if base is None else "delta", str(number))
        for number, (base, target, cost) in enumerate(drawn)
    ]


def by_trying_everything(held, target, edges):
    """The least (bytes, objects) over every subset of edges that is a way."""
    if held == target:
        return (0, 0)
    best = None
    for size in range(1, len(edges) + 1):
        for chosen in combinations(edges, size):
            way = sorted(chosen, key=lambda edge: edge.target)
            first = way[0].base is None or way[0].base == held
            linked = all(b.base == a.target for a, b in pairwise(way))
            forward = all(edge.base is None or edge.base < edge.target for edge in way)
            if first and linked and forward and way[-1].target == target:
                cost = (sum(edge.bytes for edge in way), size)
                best = cost if best is None else min(best, cost)
    return best


@settings(deadline=None, max_examples=200)
@given(bundles(), st.one_of(st.none(), st.integers(0, VERSIONS)), st.integers(0, VERSIONS))
def test_the_cheapest_way(edges, held, target):
    found, wanted = (
        CheapestRoutes(held, edges).route(target),
        by_trying_everything(held, target, edges),
    )
    if wanted is None:
        assert found is None
        return
    assert (found.bytes, found.objects) == wanted
    at = held
    for edge in found.edges:
        assert edge.base is None or edge.base == at
        at = edge.target
    assert at == target
    assert found.bytes == sum(edge.bytes for edge in found.edges)


def test_a_chain_of_many_thousands():
    """Damage anywhere on a long chain costs no more than a look at each of its edges."""
    count = 50_000
    edges = [Edge(v, v + 1, 1, "delta", str(v)) for v in range(count)]
    assert CheapestRoutes(0, edges).route(count).objects == count
    edges[count // 2] = Edge(count // 2, count // 2 + 1, 1, "delta", "other")
    del edges[count // 2]
    routes = CheapestRoutes(0, edges)
    assert routes.newest == count // 2
    assert routes.route(count) is None
    assert (
        CheapestRoutes(None, [*edges, Edge(None, count, 9, "anchor", "a")]).route(count).bytes == 9
    )
