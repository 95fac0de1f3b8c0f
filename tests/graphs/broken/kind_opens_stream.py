# expect: 'buffer' runs like compute, which cannot open a stream. Derive its class from generate or encode
from hflow import Dataset, Model, Recipe, Text, Trajectory, nodes, use
from hflow.dsl.return_types import ReturnTypes
from hflow.extend import NodeType

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)


class Buffer(NodeType):
    opens_stream = True

    def read_results(self, hint, function, error):
        return ReturnTypes(streams=(function,))


@Buffer()
def buffer() -> Trajectory:
    return Trajectory((), (), (), ())


recipe = Recipe("broken", data, [use(nodes.actor_gen, actor), buffer])
