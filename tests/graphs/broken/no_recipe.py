# expect: the file has no Recipe(...). Add 'recipe = Recipe(NAME, DATASET, NODES)'
from hflow import Dataset, Model, Text

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
