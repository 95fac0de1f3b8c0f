"""The samples that a worker holds, and the dataset rows that they start from.

`SampleStore` keeps fields of samples in memory (one `FieldColumn` per field), `SampleWriter` puts what a
source's body returned into it, and `DatasetReader` reads the rows of datasets.
"""
