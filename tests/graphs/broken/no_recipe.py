# expect: it has no Recipe(...)
from hflow import Dataset, Model, Text

data = Dataset(prompt=Text, answer=Text)
actor = Model("actor", trainable=True)
