"""Sources of images: folders, tar files, parquet files and published archives."""
