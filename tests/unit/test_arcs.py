import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from hflow.graph.arcs import Arcs

NAMES = st.sampled_from("abcdef")
LINES = st.lists(st.tuples(NAMES, NAMES), max_size=12)


def both(arcs: list[tuple[str, str]], names: list[str]) -> tuple[Arcs, "nx.DiGraph[str]"]:
    """The same graph, here and in networkx."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(names)
    graph.add_edges_from(arcs)
    return Arcs(arcs, names), graph


@given(LINES, st.permutations("abcdef"))
def test_what_leads_to_a_name_and_follows_it_is_that_of_networkx(arcs, names):
    found, graph = both(arcs, names)
    for name in names:
        assert found.ancestors(name) == nx.ancestors(graph, name)
        assert found.descendants(name) == nx.descendants(graph, name)
        assert list(found.before(name)) == list(graph.predecessors(name))


@given(LINES, st.permutations("abcdef"))
def test_orders_are_those_of_networkx(arcs, names):
    position = {name: place for place, name in enumerate("fbdace")}
    found, graph = both([(a, b) for a, b in arcs if a < b], names)
    assert list(found.generations()) == list(nx.topological_generations(graph))
    assert list(found.in_order(position)) == list(nx.lexicographical_topological_sort(graph, position.get))


@given(LINES, st.permutations("abcdef"))
def test_a_cycle_is_that_of_networkx(arcs, names):
    found, graph = both(arcs, names)
    try:
        expected = [start for start, _ in nx.find_cycle(graph)]
    except nx.NetworkXNoCycle:
        expected = []
    assert found.find_cycle() == expected


def test_nothing_follows_an_unknown_name():
    assert Arcs([("a", "b")]).descendants("c") == set()
