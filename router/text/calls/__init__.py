"""The formats in which families of models write tool calls: one file for each format.

    mistral          [TOOL_CALLS], in both variants
    deepseek         <｜tool▁call▁begin｜> …: deepseek_v3, deepseek_v31
    kimi             <|tool_call_begin|> …, with ids that name the tools: kimi_k2
    object_calls     {"name": …, "arguments": …}, with words around it or none: hermes, granite4, llama3_json
    pythonic         lists of calls in Python's syntax: pythonic, llama4_pythonic, lfm2, olmo3
    gemma            JSON with keys without quotes, and strings between tokens: gemma4
    listed           lists of such objects: granite, hunyuan_a13b, phi4_mini_json
    harmony          messages to functions, of gpt-oss: openai
    tagged           values between tags: qwen3_coder, qwen3_xml, glm45, glm47, seed_oss, minimax_m2
    dsml             such values, marked as strings or not: deepseek_v32

    call_format      what a format is: its words, the reader of one call, the grammar of answers that are calls
    heads            reads what stands before arguments, a piece at a time
    free_text        for grammars: regexes of texts without certain words
    stepwise         reads arguments that are not JSON, one state after the other
    text_values      turns plain-text values into JSON, by the tool's schema
    python_values    turns arguments in Python's syntax into JSON
    gemma_values     turns Gemma's arguments into JSON
    objects          JSON that comes in pieces: where an object ends, and what a whole one calls

`tool_formats` lists all formats.
"""
