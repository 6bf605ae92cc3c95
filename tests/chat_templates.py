"""Chat templates with tool calls and reasoning, in the formats of known model families, shortened to what they write.

The families' own templates say more to the model about its tools. What counts here is how they write the messages of
the assistant and of tools, where turns end, and what they leave out of earlier messages.
"""

from posttrain.models.pico import CHAT_TEMPLATE

# As Qwen2.5 and Hermes 2 Pro and 3: the calls of a message in <tool_call>, results as messages of the user.
HERMES = """\
{%- if tools %}
  {{- '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') }}
  {{- '<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'system' %}
    {%- if not tools %}{{- '<|im_start|>system\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
      {%- if not loop.first or message.content %}{{- '\\n' }}{% endif %}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# As Qwen3: the thinking of messages before the last one of the user is left out.
QWEN3 = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
  {%- elif message.role == 'assistant' %}
    {%- set content = message.content %}
    {%- set reasoning = message.reasoning_content or '' %}
    {%- if not reasoning and '</think>' in content %}
      {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
      {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
      {{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
      {%- if not loop.first or content %}{{- '\\n' }}{% endif %}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""

# As Llama 3.1: one call in a message, which has no other text; tools are described to the first user.
LLAMA3 = """\
{{- bos_token }}
{%- set ns = namespace(tools=tools) %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + ({'output': message.content} | tojson) + '<|eot_id|>' }}
  {%- elif message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
    {{- (call.arguments | tojson) + '}<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if ns.tools and message.role == 'user' %}
      {{- (tools | tojson) + '\\n\\n' }}{% set ns.tools = none %}
    {%- endif %}
    {{- (message.content | trim) + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# As Mistral's tokenizers v3: tools stand before the last message of the user; ids have nine letters or digits.
MISTRAL = """\
{{- bos_token }}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools and message == asked[-1] %}
      {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
    {%- endif %}
    {{- '[INST]' + message.content + '[/INST]' }}
  {%- elif message.tool_calls %}
    {{- '[TOOL_CALLS][' }}
    {%- for call in message.tool_calls %}
      {%- if call.id is not defined or call.id | length != 9 %}
        {{- raise_exception('an id has nine letters') }}
      {%- endif %}
      {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') }}
    {%- endfor %}
    {{- ']' + eos_token }}
  {%- elif message.role == 'tool' %}
    {{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id }}
    {{- '"}[/TOOL_RESULTS]' }}
  {%- elif message.role == 'assistant' %}
    {{- message.content + eos_token }}
  {%- else %}
    {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
  {%- endif %}
{%- endfor %}"""

# As Mistral's templates since 2025.
MISTRAL_ARGS = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {{- '[INST]' + message.content + '[/INST]' }}
  {%- elif message.role == 'tool' %}
    {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
  {%- elif message.role == 'assistant' %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
    {%- endfor %}
    {{- eos_token }}
  {%- else %}
    {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
  {%- endif %}
{%- endfor %}"""

# As DeepSeek V3 and R1; R1 leaves out all thinking, and opens it in the generation prompt.
DEEPSEEK = """\
{{- bos_token }}
{%- if tools %}{{- '<tools>' + (tools | tojson) + '</tools>\\n\\n' }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {{- '<｜User｜>' + message.content }}
  {%- elif message.role == 'tool' %}
    {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜tool▁outputs▁begin｜>' }}{% else %}{{- '\\n' }}{% endif %}
    {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<｜tool▁outputs▁end｜>' }}{% endif %}
  {%- elif message.role == 'assistant' %}
    {{- '<｜Assistant｜>' + message.content.split('</think>')[-1] }}
    {%- for call in message.tool_calls or [] %}
      {{- '<｜tool▁calls▁begin｜>' if loop.first else '\\n' }}
      {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
      {{- (call.function.arguments | tojson) + '\\n```<｜tool▁call▁end｜>' }}
      {%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}
    {%- endfor %}
    {{- eos_token }}
  {%- else %}
    {{- message.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{% endif %}"""

# As DeepSeek V3.1 without thinking.
DEEPSEEK_V31 = """\
{{- bos_token }}
{%- if tools %}{{- '<tools>' + (tools | tojson) + '</tools>\\n\\n' }}{% endif %}
{%- set ns = namespace(asked=false) %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- set ns.asked = true %}{{- '<｜User｜>' + message.content }}
  {%- elif message.role == 'tool' %}
    {%- set ns.asked = false %}{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
  {%- elif message.role == 'assistant' %}
    {%- if ns.asked %}{{- '<｜Assistant｜></think>' }}{% endif %}{%- set ns.asked = false %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- '<｜tool▁calls▁begin｜>' if loop.first else '' }}
      {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + (call.function.arguments | tojson) }}
      {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
    {%- endfor %}
    {{- eos_token }}
  {%- else %}
    {{- message.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}{{- '<｜Assistant｜></think>' }}{% endif %}"""

# As templates of models that keep all thinking, with pico's control tokens.
THINKER = CHAT_TEMPLATE.replace(
    "+ message['content'] -}}",
    "-}}{%- if message.reasoning_content -%}{{- '<think>' + message.reasoning_content + '</think>' -}}{%- endif -%}"
    "{{- message['content'] -}}",
)

TOOL_TEMPLATES = {
    "hermes": HERMES,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "deepseek3": DEEPSEEK,
    "deepseek3.1": DEEPSEEK_V31,
    "pico": CHAT_TEMPLATE,
    "thinker": THINKER,
}
