"""The router, the cluster's front door: validates and tokenises a request, queues it, chooses workers, runs it, and
streams its text.

Imports protos, rpc, registry and prefix_hash only; never torch, never a model's weights. Of a model it needs only the
folder's tokenizer, chat template, config.json and generation_config.json.

    one request   servicer ──> validation, prepared ──> an asked_answer for each ──> sequences ──> a lifecycle for each
                  open_requests: by their names; deadline: refused at once
                  outcome: the log's line, metrics; request_spans: traces
    one answer    lifecycle does ── request_events ── request_state decides; worker_commands, answer_messages
                  account, timings: where its time goes; seeds: what it draws with
    waiting       queue of queued_request ──> fair_shares, aside: whose turn it is, by growing_heap; queue_pace,
                  retry_budget
    choosing      worker_pool ──> candidates ──> policy; taken_room; prefix_lookup, needs
                  rebalancer ──> moves: while a stream runs
    workers       known_workers ──> worker_handle, worker_session; roster, served_kind; peers
                  worker_faults ──> ejection
    learning      forecast: whom to refuse; costs, paces: whom to choose; fading: their means
    text          text, validation: packages of their own; served_model ──> model_info, generation_defaults
    process       __main__, args, process, parts; tokenizer_servicer; metrics, gauges
                  cluster_servicer, audit: what operators ask
"""
