"""Data in the formats that others use: texts to run, and captured rows as files and as a PyTorch dataset.

    open_texts(source)   texts of JSON lines, plain text and Parquet files, folders of them, and Hugging Face `datasets`
    export_rows(run, …)  captured rows as Parquet, safetensors, Zarr or a folder of `datasets`
    RowDataset(run, …)   captured rows as a `torch.utils.data.IterableDataset`

Packages that only one format needs are imported when it is used; `birkhoff.extras` names what to install.
"""
