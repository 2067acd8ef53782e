// Package testsize lets one test run at two sizes: small in every run, large in
// a soak. The code of the test is the same in both.
package testsize

import "os"

// Variable is the environment variable that sets the size: "soak", or anything
// else for the small one.
const Variable = "ENIPLANE_TEST_SIZE"

// Pick returns soak if the environment asks for a soak, else test.
func Pick[T any](test, soak T) T {
	if os.Getenv(Variable) == "soak" {
		return soak
	}
	return test
}
