// Streams an answer over gRPC: npm install && node generate.js [ADDRESS] [PROMPT]
"use strict";
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const { loadSync } = require("@grpc/proto-loader");

const address = process.argv[2] ?? "127.0.0.1:50051";
const text = process.argv[3] ?? "The capital of France is";

const root = path.join(__dirname, "..", "..");
const definition = loadSync(path.join(root, "protos", "tandem_inference.proto"), {
  includeDirs: [root], keepCase: true, defaults: true, enums: String,
});
const { Inference } = grpc.loadPackageDefinition(definition).tandem.v1;
const client = new Inference(address, grpc.credentials.createInsecure());

let numTokens = 0; // positions are contiguous, so a client can check that no token is missing
const stream = client.Generate(
  { text, sampling_params: { max_tokens: 16, temperature: 0 } },
  { deadline: Date.now() + 30_000 },
);
stream.on("data", (chunk) => {
  if (chunk.offset !== numTokens) throw new Error(`tokens from ${chunk.offset} came, ${numTokens} was to come`);
  numTokens += chunk.token_ids.length;
  process.stdout.write(chunk.text);
  if (chunk.usage) console.log(`\n${chunk.finish_reason}: ${chunk.usage.completion_tokens} tokens`);
});
stream.on("error", (error) => {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  process.exitCode = 1;
});
stream.on("end", () => client.close());
