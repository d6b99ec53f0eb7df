"""One kernel, or several, on several devices: data and model parallel, pipelines, placement. In: calls. Out: their results, gathered."""
