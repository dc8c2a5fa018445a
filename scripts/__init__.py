"""Programs beside the package: golden data, bench, and the lab that runs real DeepSpeed."""
