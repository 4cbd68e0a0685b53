"""Load on a server, and what comes of it: `tandem bench`, for Tandem over gRPC and whatever speaks OpenAI's HTTP.

    args ──> workload (random, or a trace) ──> run: each request at its moment ──backend──> the server
                                                 └─> outcomes ──summary──> numbers ──report, plots, page──> files

Deciding is apart from doing: `workload`, `traces`, `openai_stream`, `summary`, `report` and `page` touch no network and
no clock. No torch.
"""
