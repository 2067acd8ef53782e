// Package manifests_test applies the manifests in deploy to a real API server.
package manifests_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/eniplane/eniplane/deploy/local/internal/kube"
	"github.com/eniplane/eniplane/internal/localkube"
	"github.com/eniplane/eniplane/node-syncer/ciliumnode"
)

const deploy = "../.." // from this folder

var (
	cluster *localkube.Cluster
	client  *kube.Client
)

func TestMain(m *testing.M) {
	os.Exit(localkube.Shared(m, func(c *localkube.Cluster) {
		cluster = c
		var err error
		if client, err = kube.NewClient(c.Kubeconfig); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}))
}

func TestBase(t *testing.T) {
	// Twice: what is applied again changes nothing and is no error.
	for range 2 {
		kubectl(t, "apply", "--server-side", "-k", filepath.Join(deploy, "base"))
	}
	ctx := t.Context()
	for _, name := range []string{"node-syncer", "eni-allocator", "identity-service"} {
		d, err := client.Typed.AppsV1().Deployments("eniplane").Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		checkPod(t, name, d.Spec.Template.Spec)
		if s := d.Spec.Strategy.RollingUpdate; s != nil && s.MaxSurge.IntValue() != 0 {
			t.Errorf("%s: surge of %s on the host network", name, s.MaxSurge)
		}
	}
	ds, err := client.Typed.AppsV1().DaemonSets("eniplane").Get(ctx, "agent", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	checkPod(t, "agent", ds.Spec.Template.Spec)

	if _, err := client.Dynamic.Resource(crds).Get(ctx, "ciliumnodes.cilium.io", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the base brings a CiliumNode definition, which beside Cilium is Cilium's: %v", err)
	}
	pvcs, err := client.Typed.CoreV1().PersistentVolumeClaims("").List(ctx, metav1.ListOptions{})
	if err != nil || len(pvcs.Items) != 0 {
		t.Errorf("claims %v: %v; a CNI can not wait for volumes", pvcs.Items, err)
	}
	services, err := client.Typed.CoreV1().Services("eniplane").List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range services.Items {
		if s.Spec.ClusterIP != corev1.ClusterIPNone {
			t.Errorf("service %s has the cluster address %s", s.Name, s.Spec.ClusterIP)
		}
	}
}

var crds = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}

// checkPod checks what every pod of a CNI's control plane needs, and that the
// ports agree with the flags and the probes with the ports.
func checkPod(t *testing.T, name string, pod corev1.PodSpec) {
	t.Helper()
	// Variables of Services look like settings of ours, which must be known.
	if pod.EnableServiceLinks == nil || *pod.EnableServiceLinks {
		t.Errorf("%s: variables of Services are injected", name)
	}
	if !pod.HostNetwork || pod.DNSPolicy != corev1.DNSDefault {
		t.Errorf("%s: host network %v, DNS policy %s", name, pod.HostNetwork, pod.DNSPolicy)
	}
	if len(pod.Containers) != 1 {
		t.Fatalf("%s: %d containers", name, len(pod.Containers))
	}
	c := pod.Containers[0]
	for _, p := range c.Ports {
		flag := fmt.Sprintf("--%s-listen=", p.Name)
		if p.Name == "grpc" {
			flag = "--listen="
		}
		if !slices.ContainsFunc(c.Args, func(a string) bool {
			return strings.HasPrefix(a, flag) && strings.HasSuffix(a, fmt.Sprintf(":%d", p.ContainerPort))
		}) {
			t.Errorf("%s: port %s is %d, the arguments are %v", name, p.Name, p.ContainerPort, c.Args)
		}
		if p.Name == "health" && (c.ReadinessProbe == nil || c.ReadinessProbe.GRPC == nil || c.ReadinessProbe.GRPC.Port != p.ContainerPort) {
			t.Errorf("%s: readiness is not asked on port %d", name, p.ContainerPort)
		}
	}
	if c.SecurityContext == nil || !slices.Contains(c.SecurityContext.Capabilities.Drop, "ALL") || c.SecurityContext.Privileged != nil {
		t.Errorf("%s: security context %+v", name, c.SecurityContext)
	}
}

// TestRights asks the API server what each account may do: what it needs, and
// nothing near it that it does not.
func TestRights(t *testing.T) {
	kubectl(t, "apply", "--server-side", "-k", filepath.Join(deploy, "base"))
	type attributes = authorizationv1.ResourceAttributes
	node := func(verb string) attributes {
		return attributes{Group: "cilium.io", Resource: "ciliumnodes", Verb: verb}
	}
	lease := func(namespace, name, verb string) attributes {
		return attributes{Group: "coordination.k8s.io", Resource: "leases", Namespace: namespace, Name: name, Verb: verb}
	}
	for _, tc := range []struct {
		account string
		what    attributes
		allowed bool
	}{
		{"node-syncer", node("create"), true},
		{"node-syncer", node("watch"), true},
		{"node-syncer", attributes{Group: "cilium.io", Resource: "ciliumnodes", Subresource: "status", Verb: "patch"}, true},
		{"node-syncer", attributes{Resource: "pods", Verb: "list"}, true},
		{"node-syncer", attributes{Resource: "pods", Verb: "delete"}, false},
		{"node-syncer", attributes{Resource: "nodes", Verb: "patch"}, false},
		{"node-syncer", lease("eniplane", "eniplane-eni-allocator", "get"), true},
		{"node-syncer", lease("eniplane", "eniplane-eni-allocator", "update"), false},
		{"eni-allocator", lease("eniplane", "eniplane-eni-allocator", "update"), true},
		{"eni-allocator", lease("eniplane", "other", "update"), false},
		{"eni-allocator", lease("kube-system", "eniplane-eni-allocator", "update"), false},
		{"eni-allocator", node("get"), false},
		{"eni-allocator", attributes{Resource: "pods", Verb: "list"}, false},
		{"agent", attributes{Group: "networking.k8s.io", Resource: "networkpolicies", Verb: "watch"}, true},
		{"agent", attributes{Resource: "nodes", Name: "node-1", Verb: "get"}, true},
		{"agent", attributes{Resource: "secrets", Verb: "get"}, false},
		{"agent", node("get"), false},
		{"identity-service", attributes{Resource: "nodes", Verb: "get"}, false},
		{"identity-service", node("get"), false},
	} {
		review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
			User:               "system:serviceaccount:eniplane:" + tc.account,
			Groups:             []string{"system:serviceaccounts", "system:serviceaccounts:eniplane", "system:authenticated"},
			ResourceAttributes: &tc.what,
		}}
		got, err := client.Typed.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if got.Status.Allowed != tc.allowed {
			t.Errorf("%s: %s %s/%s %s %s: allowed %v, want %v", tc.account, tc.what.Verb, tc.what.Resource, tc.what.Subresource, tc.what.Namespace, tc.what.Name, got.Status.Allowed, tc.allowed)
		}
	}
}

func TestComponents(t *testing.T) {
	// The definition in the component is a copy: kustomize takes no file from
	// outside its folder.
	definition, err := os.ReadFile(filepath.Join(deploy, "components/ciliumnode-crd/cilium.io_ciliumnodes.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(definition, ciliumnode.CRD()) {
		t.Error("deploy/components/ciliumnode-crd/cilium.io_ciliumnodes.yaml is not node-syncer's: copy node-syncer/ciliumnode/cilium.io_ciliumnodes.yaml there")
	}

	base, err := filepath.Abs(deploy)
	if err != nil {
		t.Fatal(err)
	}
	overlay := t.TempDir()
	relative, err := filepath.Rel(overlay, base)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf(`resources: [%[1]s/base]
components: [%[1]s/components/ciliumnode-crd, %[1]s/components/irsa]
patches:
  - patch: |
      {apiVersion: v1, kind: ConfigMap, metadata: {name: eniplane-settings, namespace: eniplane}, data: {AWS_ROLE_ARN: "arn:aws:iam::123456789012:role/x"}}
`, relative)
	if err := os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	kubectl(t, "apply", "--server-side", "-k", filepath.Join(deploy, "base"))
	out := kubectl(t, "apply", "--server-side", "--dry-run=server", "-k", overlay)
	for _, want := range []string{"customresourcedefinition.apiextensions.k8s.io/ciliumnodes.cilium.io", "deployment.apps/eni-allocator"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %s in %s", want, out)
		}
	}
	rendered := kubectl(t, "kustomize", overlay)
	for _, want := range []string{"AWS_WEB_IDENTITY_TOKEN_FILE", "audience: sts.amazonaws.com", "AWS_ROLE_ARN: arn:aws:iam::123456789012:role/x"} {
		if !strings.Contains(rendered, want) {
			t.Errorf("no %q in the overlay", want)
		}
	}
}

// kubectl runs the pinned kubectl against the cluster and returns its output.
func kubectl(t *testing.T, args ...string) string {
	t.Helper()
	binary := os.Getenv("ENIPLANE_KUBECTL")
	if binary == "" {
		out, err := exec.Command(filepath.Join(deploy, "../.ci/tool"), "kubectl").Output()
		if err != nil {
			t.Fatalf("kubectl: set ENIPLANE_KUBECTL: %v", err)
		}
		binary = strings.TrimSpace(string(out))
	}
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), binary, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+cluster.Kubeconfig)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
