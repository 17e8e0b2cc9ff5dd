"""Chat templates of ten families of models, written for these tests after the formats that the models were trained on.

The long system prompts about tools are cut short. What matters here is kept: special tokens, the order of turns, what
the template rewrites, and how turns end.
"""

# ruff: noqa: RUF001  # the special tokens of DeepSeek have full-width bars

from __future__ import annotations

from typing import Any, NamedTuple

from builders import byte_tokenizer


class Family(NamedTuple):
    """A chat template with the special tokens of its tokenizer; the first is BOS and the last EOS."""

    template: str
    special: tuple[str, ...]

    def tokenizer(self) -> Any:
        """A tokenizer with one token for each byte and for each special token."""
        return byte_tokenizer(self.template, special=self.special)


CHATML = r"""
{%- if tools -%}{{- '<|im_start|>system\nTools: ' + tools | tojson + '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
{%- generation -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}{{- '<tool_call>' + call.function | tojson + '</tool_call>' -}}{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\n' -}}
{%- else -%}{{- m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

LLAMA_3 = r"""
{{- '<|begin_of_text|>' -}}
{%- if tools -%}{{- '<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n<|eot_id|>' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | tojson + '<|eot_id|>' -}}
{%- elif m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}
{%- set call = m.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -}}
{%- if tools and loop.first -%}{{- tools | map('tojson') | join('\n\n') + '\n\n' -}}{%- endif -%}
{{- m.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{%- endif -%}
"""

QWEN_2_5 = r"""
{{- '<|im_start|>system\nYou are Qwen.' -}}
{%- if tools -%}
{{- '\n\n# Tools\n\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant' -}}
{%- if m.content -%}{{- '\n' + m.content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

QWEN_3 = r"""
{%- if tools -%}
{{- '<|im_start|>system\n# Tools\n\n<tools>' -}}
{%- for tool in tools -%}{{- '\n' + tool | tojson -}}{%- endfor -%}
{{- '\n</tools><|im_end|>\n' -}}
{%- endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.asked and (loop.last or m.reasoning_content) -%}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{%- if m.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

GEMMA = r"""
{{- '<bos>' -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate between user and assistant') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}
{{- m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}
"""

MISTRAL = r"""
{{- '<s>' -}}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list | last -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
{%- if tools and m == asked -%}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{{- '[INST] ' + m.content + '[/INST]' -}}
{%- elif m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{%- if (call.id or '') | length != 9 -%}{{- raise_exception('ids of calls have 9 characters') -}}{%- endif -%}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']</s>' if loop.last else ', ') -}}
{%- endfor -%}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content | trim + '</s>' -}}
{%- else -%}
{{- '[TOOL_RESULTS] {"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- endif -%}
{%- endfor -%}
"""

GLM = r"""
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\n# Tools\n<tools>\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '</tools>' -}}
{%- endif -%}
{%- set ns = namespace(asked=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.asked = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|assistant|>\n<think>' + (m.reasoning_content or '' if loop.index0 > ns.asked else '') + '</think>' -}}
{%- if m.content -%}{{- '\n' + m.content -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>' + call.function.name + '\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
{{- (value if value is string else value | tojson) + '</arg_value>\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- else -%}{{- '<|' + m.role + '|>\n' + m.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

GPT_OSS = r"""
{{- '<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>' -}}
{%- if tools -%}
{{- '<|start|>developer<|message|># Tools\n\nnamespace functions {\n' -}}
{%- for tool in tools -%}{{- '// ' + tool.function.description + '\ntype ' + tool.function.name + '\n' -}}{%- endfor -%}
{{- '}<|end|>' -}}
{%- endif -%}
{%- set ns = namespace(tool='', final=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.final = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if m.thinking and (loop.index0 > ns.final or loop.last) -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}
{%- endif -%}
{%- if m.tool_calls -%}
{%- set call = m.tool_calls[0].function -%}
{%- set ns.tool = call.name -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson + '<|call|>' -}}
{%- else -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- m.content | tojson + '<|end|>' -}}
{%- else -%}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}
"""

DEEPSEEK_R1 = r"""
{{- '<｜begin▁of▁sentence｜>' -}}
{%- if tools -%}{{- '## Tools\n' + tools | tojson -}}{%- endif -%}
{%- for m in messages -%}
{%- set after_tool = not loop.first and messages[loop.index0 - 1].role == 'tool' -%}
{%- if m.role == 'user' -%}{{- '<｜User｜>' + m.content -}}
{%- elif m.role == 'tool' -%}
{%- if not after_tool -%}{{- '<｜tool▁outputs▁begin｜>' -}}{%- endif -%}
{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<｜tool▁outputs▁end｜>' -}}{%- endif -%}
{%- else -%}
{%- if not after_tool -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
{{- m.content.split('</think>')[-1] -}}
{%- for call in m.tool_calls or [] -%}
{%- if loop.first -%}{{- '<｜tool▁calls▁begin｜>' -}}{%- else -%}{{- '\n' -}}{%- endif -%}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' -}}
{{- call.function.arguments | tojson + '\n```<｜tool▁call▁end｜>' -}}
{%- if loop.last -%}{{- '<｜tool▁calls▁end｜>' -}}{%- endif -%}
{%- endfor -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}{{- '<｜Assistant｜>' -}}{%- endif -%}
"""

PHI = r"""
{%- if tools -%}{{- '<|system|><|tool|>' + tools | tojson + '<|/tool|><|end|>' -}}{%- endif -%}
{%- for m in messages -%}
{{- '<|' + ('tool_response' if m.role == 'tool' else m.role) + '|>' + m.content -}}
{%- if m.tool_calls -%}
{{- '<|tool_call|>' + m.tool_calls | map(attribute='function') | list | tojson + '<|/tool_call|>' -}}
{%- endif -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- else -%}{{- '<|endoftext|>' -}}{%- endif -%}
"""

FAMILIES = {
    "chatml": Family(CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama 3": Family(LLAMA_3, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "qwen 2.5": Family(QWEN_2_5, ("<|im_start|>", "<|im_end|>")),
    "qwen 3": Family(QWEN_3, ("<|im_start|>", "<|im_end|>")),
    "gemma": Family(GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>")),
    "mistral": Family(
        MISTRAL,
        (
            *("<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        ),
    ),
    "glm": Family(
        GLM, ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
    ),
    "gpt-oss": Family(GPT_OSS, ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")),
    "deepseek r1": Family(
        DEEPSEEK_R1,
        (
            *(
                "<｜begin▁of▁sentence｜>",
                "<｜User｜>",
                "<｜Assistant｜>",
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁calls▁end｜>",
            ),
            *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
            *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<｜end▁of▁sentence｜>"),
        ),
    ),
    "phi": Family(
        PHI,
        (
            *("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
            *("<|tool_call|>", "<|/tool_call|>", "<|tool_response|>", "<|endoftext|>"),
        ),
    ),
}
