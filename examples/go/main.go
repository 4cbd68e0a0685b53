// Streams an answer over gRPC. Generate the client first, from the repository's root:
//
//	protoc -I. --go_out=examples/go --go_opt=Mprotos/tandem_inference.proto=./tandem \
//	       --go-grpc_out=examples/go --go-grpc_opt=Mprotos/tandem_inference.proto=./tandem protos/tandem_inference.proto
//	cd examples/go && go mod tidy && go run . 127.0.0.1:50051
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "example.com/tandem-example/tandem"
)

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()

	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	maxTokens, temperature := uint32(16), float32(0)
	stream, err := pb.NewInferenceClient(connection).Generate(ctx, &pb.GenerateRequest{
		Prompt:         &pb.GenerateRequest_Text{Text: "The capital of France is"},
		SamplingParams: &pb.SamplingParams{MaxTokens: &maxTokens, Temperature: &temperature},
	})
	if err != nil {
		log.Fatal(err)
	}
	numTokens := uint32(0)
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			log.Fatal(err)
		}
		if chunk.Offset != numTokens {
			log.Fatalf("tokens from %d came, %d was to come", chunk.Offset, numTokens)
		}
		numTokens += uint32(len(chunk.TokenIds))
		fmt.Print(chunk.Text)
		if chunk.Usage != nil {
			fmt.Printf("\n%s: %d tokens\n", chunk.FinishReason, chunk.Usage.CompletionTokens)
		}
	}
}
