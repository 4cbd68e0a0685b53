"""How families of models write calls of tools: one file for each way of writing.

    mistral          [TOOL_CALLS], in both ways of saying what is called
    deepseek         <｜tool▁call▁begin｜> …: deepseek_v3, deepseek_v31
    object_calls     {"name": …, "arguments": …}, with words around it or none: hermes, llama3_json
    harmony          messages to functions, of gpt-oss: openai
    tagged           values between tags: qwen3_coder, qwen3_xml, glm45, glm47

    call_format      what a format is: its words, what reads one call, the grammar of an answer that is calls
    heads            what stands before arguments, read a piece at a time
    free_text        as grammars have it, texts without certain words
    text_values      what such a value is as JSON, by the tool's schema
    objects          JSON that comes in pieces: where an object ends, what a whole one calls

`tool_formats` knows which there are.
"""
