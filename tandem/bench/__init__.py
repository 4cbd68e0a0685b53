"""`tandem bench`: puts load on a server and measures its answers: Tandem over gRPC, or any OpenAI-compatible server.

    args ──> workload (random, or a trace) ──> run: each request at its moment ──backend──> the server
                                                 └─> outcomes ──summary──> numbers ──report, plots, page──> files

Deciding is apart from doing: `workload`, `traces`, `openai_stream`, `summary`, `report` and `page` touch no network and
no clock. No torch.
"""
